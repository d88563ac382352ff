"""Signature of a stage: its parameters, inputs and outputs, and the checks of a request by them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from stages.contract.errors import UserError
from stages.contract.number_types import Processor

SPEED_ONLY: dict[str, Any] = {"affects_result": False}
"""Mark of fields that stay out of the key."""
# Names of the fields that hold a type of numbers.
_NUMBER_TYPES = ("dtype", "precision")

ImageName = Literal["core", "torch", "vllm"]
"""Container image by what it holds: nothing beyond the contract's packages, torch, or vLLM."""


@dataclass(frozen=True)
class InputSpec:
    """One input of a stage, which a request may leave out, or give several times in an order."""

    optional: bool = False
    many: bool = False


@dataclass(frozen=True)
class OutputSpec:
    """One file or folder of a stage's artifact; an optional one is not in all of them.

    Attributes:
        kind: Text for the reference page: ``model``, ``metrics``, ``file``, or the name of a table
            in :mod:`stages.tables.schemas`.
    """

    kind: str
    optional: bool = False


def check_inputs(
    stage: str, specs: Mapping[str, InputSpec], given: Mapping[str, Sequence[Any]]
) -> None:
    """Compares the inputs of a request with the stage's declaration.

    Raises:
        UserError: An input is missing, unknown, or given too often.
    """
    remedy = f"inputs of {stage}: {', '.join(specs)}"
    for name, group in given.items():
        if name not in specs:
            raise UserError(f"stage {stage!r} has no input {name!r}", remedy)
        if len(group) > 1 and not specs[name].many:
            raise UserError(
                f"stage {stage!r} reads one {name!r}, and is given {len(group)}", remedy
            )
    for name, spec in specs.items():
        if not spec.optional and not given.get(name):
            raise UserError(f"stage {stage!r} lacks its input {name!r}", remedy)


def check_output(stage: str, specs: Mapping[str, OutputSpec], path: str) -> None:
    """UserError if a path inside an artifact belongs to no declared output."""
    if not any(fnmatchcase(path, pattern) for pattern in specs):
        raise UserError(
            f"stage {stage!r} has no output {path!r}", f"outputs of {stage}: {', '.join(specs)}"
        )


def speed_only(default: Any, **options: Any) -> Any:
    """A field that changes speed or place, never the result: it stays out of the key.

    >>> class Example(StageParams):
    ...     batch_size: int = speed_only(8, description="Rows per forward pass.")
    """
    return Field(default, json_schema_extra=SPEED_ONLY, **options)


class Settings(BaseModel):
    """An immutable group of settings that refuses names it does not know."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_plain(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool):
            # To pydantic `true` is the number 1.
            kinds = get_args(annotation) or (annotation,)
            if bool not in kinds and {int, float} & set(kinds):
                raise ValueError("a number is wanted")
        elif get_origin(annotation) is tuple and isinstance(value, str | int | float):
            # One value is a list of one.
            return (value,)
        return value

    def unused_fields(self) -> frozenset[str]:
        """Names of fields that the others make irrelevant to the result; not in the key."""
        return frozenset()

    def result_fields(self) -> dict[str, Any]:
        """The settings that can change the result, as JSON values."""
        kept: dict[str, Any] = {}
        dumped = self.model_dump(mode="json")
        unused = self.unused_fields()
        for name, field in type(self).model_fields.items():
            if name in unused or field.json_schema_extra == SPEED_ONLY:
                continue
            value = getattr(self, name)
            kept[name] = value.result_fields() if isinstance(value, Settings) else dumped[name]
        return kept

    def for_processor(self, processor: Processor) -> Self:
        """These settings with `auto` as a type of numbers replaced, in nested ones too."""
        changes: dict[str, Any] = {}
        for name, value in self:
            if isinstance(value, Settings):
                changes[name] = value.for_processor(processor)
            elif name in _NUMBER_TYPES and value == "auto":
                changes[name] = processor.number_type
        return self.model_copy(update=changes)


def _check_template_args(values: dict[str, Any]) -> dict[str, Any]:
    if "chat_template" in values:
        raise ValueError("chat_template is not a variable; save it with the tokenizer")
    return values


class ChatSettings(Settings):
    """Rendering of conversations by a checkpoint's chat template."""

    system_prompt: str = ""
    """System turn put before conversations that open with none; empty adds none."""
    chat_template_args: Annotated[dict[str, Any], AfterValidator(_check_template_args)] = Field(
        default_factory=dict
    )
    """Variables for the chat template (`{enable_thinking: false}`)."""
    allow_control_tokens: bool = False
    """Read text that spells control tokens (`<|im_end|>`) as these tokens, in prompts, preferences,
    conversations, and by reward models. Otherwise it is refused; the response that a reward model
    would read has no score."""


class OwnFunction(Settings):
    """A function of a Python file of the user's."""

    function: str
    """Name of the function in ``code``."""
    settings: dict[str, int | float | str] = Field(default_factory=dict)
    """Arguments of the function by name, such as a paper's constants."""


class StageParams(Settings):
    """Parameters of one stage, and what the rest of the project needs to know of it.

    The class variables ``stage`` and ``version`` enter the key, others do not.
    """

    stage: ClassVar[str]
    """Name of the stage and of its folder."""
    version: ClassVar[str]
    """Version of its behaviour; raising it makes every artifact of the stage stale."""
    inputs: ClassVar[Mapping[str, InputSpec]] = {}
    """Inputs by name."""
    outputs: ClassVar[Mapping[str, OutputSpec]] = {}
    """Files and folders of the artifact by path; ``*`` in a path matches any text."""
    image: ClassVar[ImageName] = "core"
    """Container image that the stage needs; see :meth:`image_for`."""
    late_modules: ClassVar[tuple[str, ...]] = ()
    """Modules that the stage imports while it runs; :mod:`stages.harness.fork_server` loads them
    beforehand."""
    writes_registry: ClassVar[bool] = False
    """True for a stage that writes into the model registry of its store."""

    def image_for(self, *, from_hub: bool) -> ImageName:
        """Container image for these parameters, and for inputs of the Hugging Face hub.

        To be overridden if they decide.
        """
        return self.image
