"""A tokenizer of pieces, as SentencePiece makes them: a space is part of the word behind it."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BYTES = [f"<0x{number:02X}>" for number in range(256)]


def pieces_tokenizer(family, *, end, prepend):
    """With the family's special tokens. `prepend`: where a space is put before a word, as `Metaspace` calls it."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    alphabet = [*map(chr, range(33, 127)), "▁", "\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<pad>", *BYTES], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["user assistant tool response answer system"] * 10, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", pad_token="<pad>", eos_token=end)
    tokenizer.add_tokens([*family.special, family.end, "<|endoftext|>"], special_tokens=True)
    tokenizer.chat_template = family.template
    return tokenizer
