"""Fields of config.json that change nothing about a forward pass, for any family.

Training, bookkeeping, what a library returns beside the logits, and sampling settings and token ids, which are read
from generation_config.json and the tokenizer. A field is here because somebody looked; one that is not is refused.
"""

# fmt: off
HARMLESS_FIELDS = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled", "_model_name_or_path",
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bad_words_ids", "begin_suppress_tokens",
    "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "id2label", "initializer_range", "is_decoder", "is_llama_config", "label2id",
    "length_penalty", "max_length", "max_sequence_length", "min_length", "model_type", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "pad_token_id", "prefix", "problem_type", "remove_invalid_values", "repetition_penalty",
    "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version",
    "typical_p", "unk_token_id", "unsloth_version", "use_cache",
})
# fmt: on
