"""`AgentLoopBase`, which turns one prompt into one trajectory."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from verl.experimental.agent_loop.errors import AgentLoopError, PromptTooLong
from verl.experimental.agent_loop.tool_calls import UNNAMED, SampleCalls
from verl.utils.chat_template import Turns, turns_of
from verl.utils.dataset.rl_dataset import truncate
from verl.utils.pictures import Medium, Picture, PictureError, PictureProcessor, Video, by_kind
from verl.workers.config import PPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.experimental.agent_loop.output import AgentLoopOutput
    from verl.experimental.agent_loop.server_manager import ServerManager

T = TypeVar("T")

# One thread: a fast tokenizer must not be used from two at once, and the event loop must not wait for templates.
tokenizer_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")


@dataclass(frozen=True, slots=True)
class DictConfigWrap:
    """verl's wrapper of the configuration that a loop gets."""

    config: Any


class AgentLoopBase(ABC):
    """One instance per sample, in an `AgentLoopWorker`; thousands run at once on one event loop, so `run` never blocks.

    A subclass may take further keyword arguments; they come from its entry in `agent_loop_config_path`.
    """

    sees = False
    """Whether `run` passes the sample's pictures to `generate`. If not, samples with pictures are refused."""
    rewards = False
    """Whether `run` gives every sample its reward. If not, the data need a rule or a reward function."""
    pictures: PictureProcessor | None = None
    """What makes tokens of pictures; the worker sets it before `run`. None: the model reads text alone."""
    tool_calls: SampleCalls = UNNAMED
    """The calls of tools in earlier attempts at this sample; the worker sets it before `run`."""

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: ServerManager,
        tokenizer: PreTrainedTokenizerBase,
        processor: None = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """All arguments are keywords with verl's names. Raises TypeError for others that a subclass passes on."""
        if kwargs:
            raise TypeError(f"{type(self).__name__} does not know {sorted(kwargs)}")
        self.config: PPOConfig = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.data_config = self.config.data
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.apply_chat_template_kwargs = self.config.data.apply_chat_template_kwargs

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that `run` runs on."""
        return asyncio.get_running_loop()

    @classmethod
    def shown_tools(cls, config: PPOConfig) -> Sequence[Any]:
        """Schemas of the tools that `run` passes to `prompt_tokens`. The driver counts the prompts' tokens with them.

        Raises ConfigError for tools that cannot be loaded.
        """
        return ()

    @classmethod  # noqa: B027 - for most loops their names are all that can be wrong
    def check_options(cls, where: str, **options: Any) -> None:
        """Raise ConfigError, with `where`, for values in the loop's entry of `agent_loop_config_path` that `run` could
        not use. Called on the driver before the start; the constructor accepts their names."""

    @classmethod  # noqa: B027 - most loops can use any
    def check_tokenizer(cls, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ConfigError for a tokenizer that `run` could not use. Called on the driver before the start."""

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """`kwargs` are the sample's columns: `raw_prompt` (chat messages), `extra_info`, ...

        `sampling_params` has the fields of `SamplingOptions`; `max_tokens` is the budget of the whole response, tool
        answers included. Any exception fails the batch; the error names the sample.
        """

    async def prompt_tokens(self, sample: Mapping[str, Any], tools: Sequence[Any] | None = None) -> list[int]:
        """Token ids of the sample's `raw_prompt` with the generation prompt, fitted to data.max_prompt_length.

        Uses the data set's own `prompt_ids`, if it has them and the prompt shows no tools. Raises PromptTooLong for a
        longer prompt if data.truncation=error.
        """
        data = self.config.data
        if not tools and sample.get("prompt_ids") is not None:
            return fit_prompt(list(sample["prompt_ids"]), data.max_prompt_length, data.truncation)
        if sample.get("raw_prompt") is None:
            raise AgentLoopError(
                "the sample has no column raw_prompt with chat messages: set data.return_raw_chat=true"
            )
        token_ids = await self.apply_chat_template(sample["raw_prompt"], tools)
        return fit_prompt(token_ids, data.max_prompt_length, data.truncation)

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        images: Sequence[Picture] | None = None,
        videos: Sequence[Video] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """verl's name: token ids of a conversation, up to where the policy's next message begins.

        `images` and `videos` are those of `process_vision_info` if both are None. Raises AgentLoopError for those that
        the model or its chat template does not show.
        """
        if others := {key: value for key, value in kwargs.items() if value}:
            raise ValueError(f"apply_chat_template: {sorted(others)} is not supported")
        given: list[Medium] = [*(images or ()), *(videos or ())]
        text = await self.rendered(messages, tools)
        expand = await self.in_tokenizer_thread(lambda: self.expansion(given or pictures_of(messages)))
        return await self.tokens(text if expand is None else expand(text))

    async def process_vision_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """verl's name for the pictures and videos of a conversation, for `generate(image_data=..., video_data=...)` and
        `AgentLoopOutput.multi_modal_data`: {images: their list, videos: theirs}, without those of which are none."""
        return {name: found for name, found in by_kind(pictures_of(messages)).items() if found}

    def expansion(self, pictures: Sequence[Medium]) -> Callable[[str], str] | None:
        """What puts the text that pictures become in the place of the chat template's for them; None without any.

        Raises AgentLoopError for a model that reads text alone, and where it finds other numbers of them; PictureError
        for a picture that cannot be opened. Call it on the tokenizer's thread.
        """
        processor = self.pictures
        if not pictures:
            return None
        if processor is None:
            raise AgentLoopError(f"a conversation has {len(pictures)} pictures, and the model reads text alone")
        texts = [processor.text(picture) for picture in pictures]

        def expand(text: str) -> str:
            try:
                return processor.expanded(text, texts)
            except PictureError as exc:
                raise AgentLoopError(
                    f"{exc}: set actor_rollout_ref.model.custom_chat_template to one that shows them in messages of "
                    "every role"
                ) from exc

        return expand

    async def rendered(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> str:
        """The conversation as the chat template writes it, up to where the policy's next message begins."""
        tokenizer: Any = self.tokenizer
        return await self.in_tokenizer_thread(
            lambda: tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **self.config.data.apply_chat_template_kwargs,
            )
        )

    async def tokens(self, text: str) -> list[int]:
        """Token ids of a piece of a conversation: no special tokens are added."""
        return await self.in_tokenizer_thread(lambda: self.tokenizer.encode(text, add_special_tokens=False))

    async def text(self, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """The exact text of the tokens, special ones included: in some vocabularies `<tool_call>` and `<think>` are
        special."""
        return await self.in_tokenizer_thread(lambda: self.decoded(token_ids, keep_special_tokens=keep_special_tokens))

    def decoded(self, token_ids: Sequence[int], *, keep_special_tokens: bool = True) -> str:
        """As `text`. Call it on the tokenizer's thread."""
        tokenizer: Any = self.tokenizer
        text: str = tokenizer.decode(
            token_ids, skip_special_tokens=not keep_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    async def turns(self, tools: Sequence[Any] | None = None) -> Turns:
        """The chat template's text after a message of the policy. Call its methods on the tokenizer's thread."""
        arguments = self.config.data.apply_chat_template_kwargs
        return await self.in_tokenizer_thread(lambda: turns_of(self.tokenizer, tools, arguments))

    async def reply_tokens(
        self, replies: Sequence[Mapping[str, Any]], said: Sequence[int], tools: Sequence[Any] | None = None
    ) -> list[int]:
        """The tokens that the chat template puts between the policy's message `said` and its next one.

        `replies` are the messages of others in between: `{role, content}`, with `name` for `tool`. Special tokens in
        their text become ordinary ones. The end of `said` occurs once, whether the policy or the template wrote it.
        Pictures are parts {type: image, image: Picture} of their content. Raises the errors of `expansion`.
        """
        turns = await self.turns(tools)
        return await self.in_tokenizer_thread(
            lambda: turns.between(replies, said, self.expansion(pictures_of(replies)))
        )

    async def in_tokenizer_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(tokenizer_thread, work)


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[Medium]:
    """The pictures and videos in parts of messages, in order."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    given = [part.get(type_) for part in parts if isinstance(part, Mapping) for type_ in ("image", "video")]
    return [each for each in given if isinstance(each, (Picture, Video))]


def fit_prompt(token_ids: list[int], limit: int, truncation: str) -> list[int]:
    """At most `limit` tokens, cut by `data.truncation`. Raises PromptTooLong if that is `error`."""
    if len(token_ids) <= limit:
        return token_ids
    if truncation == "error":
        raise PromptTooLong(
            f"a prompt of {len(token_ids)} tokens exceeds data.max_prompt_length={limit}; raise it, or set "
            "data.truncation to left, right or middle, or data.filter_overlong_prompts=true"
        )
    return truncate(token_ids, limit, truncation)
