// Which instruction set runs: the best of this CPU, unless one was asked for.
#pragma once

#include "kernels.h"

extern "C" {
// The name of the instruction set in use.
__attribute__((visibility("default"))) const char* jaxkv_level();
// Uses `name` (generic, avx2, avx512, avx512_bf16 or amx) from the next call on; returns 0, or 1 where the CPU or the
// build lacks it.
__attribute__((visibility("default"))) int jaxkv_set_level(const char* name);
// Whether that instruction set has products of activations rounded to 8 bits.
__attribute__((visibility("default"))) int jaxkv_has_int8_products();
}
