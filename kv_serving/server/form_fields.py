"""The fields of a chat request that give an answer a form: JSON of a schema, or calls of tools."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from kv_serving.server.sampling_fields import RequestModel


class TextFormat(RequestModel):
    """No form."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestModel):
    """A JSON schema with a name."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), populate_by_name=True)

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(RequestModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ToolFunction(RequestModel):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool; functions are the one kind that there is."""

    type: Literal["function"]
    function: ToolFunction


class FunctionName(RequestModel):
    """A function by its name."""

    name: str


class NamedTool(RequestModel):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool
