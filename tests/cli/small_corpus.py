"""Parallel texts, and models as transformers opens them, for the tests of commands."""

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

# The longest is neither first nor last: batches are made by length, and the output is in the order of the input.
SOURCES = ["twenty-one", "half past nine on the fourth of May", "", "it costs two hundred"]
REFERENCES = ["einundzwanzig", "halb zehn am vierten Mai", "", "es kostet zwei-hundert"]

# Of what is installed and slow to import, what neither help nor a first translation needs.
NEEDED_BY_NONE = {
    "datasets", "evaluate", "hf_vanilla_transformer.metrics", "matplotlib", "pandas", "pyarrow",
    "sacrebleu", "scipy", "sklearn",
}  # fmt: skip


def write_texts(folder, times=1):
    for name, texts in (("source.en", SOURCES), ("reference.de", REFERENCES)):
        (folder / name).write_text("".join(f"{text}\n" for text in times * texts), encoding="utf-8")


def load(checkpoint):
    """Model and tokenizer."""
    return AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval(), AutoTokenizer.from_pretrained(checkpoint)
