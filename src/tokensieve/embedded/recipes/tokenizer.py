"""The embedded model's tokenizer: one token per word, for the few words that describe scenes.

`python -m tokensieve.embedded.recipes.tokenizer FOLDER` writes it again. Any string can be encoded; an unknown word becomes
[UNK]. The end token has the highest id, as open_clip's text tower expects of the token it reads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokensieve.embedded.scenes import COLOURS, SHAPES

_OTHER_WORDS = """
a an the of in on at and or with to from is are was there here this that it one two three four five no yes not
picture photo image drawing scene view thing object something objects things shape colour background
left right above below beside between next near over under seen what where how many which who do you see
big small large little bright dark blurry noisy cluttered some any all each other only
. , ? ! : ;
"""
WORDS = (*COLOURS, *SHAPES, *_OTHER_WORDS.split())


def write(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer reads."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    ids = {token: i for i, token in enumerate(("[PAD]", "[UNK]", "[BOS]", *WORDS, "[EOS]"))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    ends = [(token, ids[token]) for token in ("[BOS]", "[EOS]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A [EOS]", special_tokens=ends)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "padding_side": "right",
        "model_max_length": 24,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
