"""Make a small Qwen2 model with random weights and a sentencepiece tokenizer trained on the tasks of a run.

python tools/make_tiny_model.py examples/brorl_tiny.toml runs/brorl_tiny/init
"""

from __future__ import annotations

import argparse
import json
import string
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from random_model import qwen2_config, write_random_model
from tiny_tokenizer import train_sentencepiece

from megatron_brorl.checkpoints.hugging_face import add_generation_files
from megatron_brorl.config.load import load
from megatron_brorl.config.schema import Config
from megatron_brorl.data.chat import prompt_text
from megatron_brorl.data.generate import corpus
from megatron_brorl.data.prompts import RowFormat, read_rows
from megatron_brorl.data.sentencepiece import SETTINGS
from megatron_brorl.errors import UserError
from megatron_brorl.files import read_object

# The first letter of a role stands for it: "u:", "a:".
CHAT = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token if m.role == 'assistant' else ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def _corpus(config: Config, count: int) -> Iterator[str]:
    """Yield the prompts and answers of a run: those of its data files, or `count` examples of its tasks."""
    data = config.data
    files = [*data.train, *(name for source in data.mixture for name in source.files)]
    if not files:
        yield from corpus(data, config.run.seed, count)
    row_format = RowFormat(data.verifier, config.reward, data.columns)
    for name in files:
        for row in read_rows(Path(name), row_format):
            yield data.template.replace("{prompt}", prompt_text(row.prompt), 1)
            yield from [text for text in dict.fromkeys((row.answer, row.target)) if text]


def make(
    config: Config,
    directory: Path,
    *,
    vocab: int = 100,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 384,
    context: int = 128,
    untied: bool = False,
    texts: int = 2000,
    chat: bool = False,
) -> str:
    """Write the Hugging Face directory and return a line about it. The seed of the run determines the weights.

    vocab: maximum number of sentencepiece pieces. untied: do not tie the LM head to the embedding. texts: number of
    examples to train the tokenizer on. chat: write a chat template.
    """
    # Add all printable ASCII characters, so that the tokenizer has a piece for each of them.
    corpus_texts = chain(_corpus(config, texts), string.printable[:95])
    tokenizer = train_sentencepiece(corpus_texts, directory, vocab)
    model = qwen2_config(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=tokenizer.vocab_size,
        context=context,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )
    model["tie_word_embeddings"] = not untied
    parameters = write_random_model(model, directory, config.run.seed)
    add_generation_files(directory, directory)
    if chat:
        settings = read_object(directory / SETTINGS)
        (directory / SETTINGS).write_text(json.dumps({**settings, "chat_template": CHAT}), encoding="utf-8")
    return f"{directory}: Qwen2 with {parameters:,} parameters, sentencepiece tokenizer of {tokenizer.vocab_size}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="TOML file of the run; its data files or data.tasks are the corpus")
    parser.add_argument("directory", type=Path, help="Hugging Face directory to write")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--vocab", type=int, default=100, help="maximum number of sentencepiece pieces (%(default)s)")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--ffn", type=int, default=384)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--untied", action="store_true", help="do not tie the LM head to the embedding")
    parser.add_argument("--chat", action="store_true", help="write a chat template")
    parser.add_argument(
        "--texts", type=int, default=2000, help="number of examples to train the tokenizer on (%(default)s)"
    )
    options = vars(parser.parse_args())
    config = load(options.pop("config"), options.pop("overrides"))
    print(make(config, options.pop("directory"), **options))


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as e:
        print(f"make_tiny_model: {e}", file=sys.stderr)
        sys.exit(2)
