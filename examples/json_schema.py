"""JSON by a schema, drafted and verified under the masks of a grammar engine.

    pip install xgrammar jsonschema          # or llguidance, with --engine llguidance
    python examples/json_schema.py --runs 5
    python examples/json_schema.py --schema FILE --prompt TEXT --target TARGET [--draft DRAFT]

The engine says which tokens may come next; target and draft are sampled under that, so that every
text is valid, and distributed as if the target alone had been sampled so. Without --target the
small pair of specdec-ext-pair writes, which was taught Python: valid JSON, and no sense.
"""

import argparse
import json
import time
from pathlib import Path

import jsonschema
import torch

import specdec_ext
from specdec_ext.commands.pair import load_pair

#: Everything in it is bounded, so that a text ends whatever is drawn.
SCHEMA = {
    "type": "object",
    "properties": {
        "function": {"type": "string", "pattern": "^[a-z_]{3,12}$"},
        "arguments": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]{1,8}$"},
            "maxItems": 3,
        },
        "returns": {"enum": ["None", "int", "str", "list", "dict"]},
        "line": {"type": "integer", "minimum": 1, "maximum": 999},
        "documented": {"type": "boolean"},
    },
    "required": ["function", "arguments", "returns", "line", "documented"],
    "additionalProperties": False,
}
PROMPT = "import json\n\n# One function of a module, as JSON:\nRECORD = "


def grammar_of(engine, schema, tokenizer, vocab_size):
    """Compile a schema: what `generate` makes or has made a matcher of for every request.

    ``vocab_size`` is the model's, which may be padded behind the tokenizer's tokens.
    """
    if engine == "xgrammar":
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        compiler = xgrammar.GrammarCompiler(info)
        return compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
    import llguidance
    import llguidance.hf

    tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size)
    options = {"whitespace_flexible": False}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
    return lambda: llguidance.LLMatcher(tokens, grammar)


def text_of(sequence, prompt_ids, tokenizer):
    """Decode what came behind the prompt."""
    return tokenizer.decode(sequence[prompt_ids.shape[1] :], skip_special_tokens=True)


def is_valid(text, schema):
    """Whether a text is JSON that the schema describes, in the judgement of jsonschema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def main():
    """Write some texts, with the draft and without, and count the valid ones."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schema", type=Path, help="a file; default: a record of a function")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--engine", choices=["xgrammar", "llguidance"], default="xgrammar")
    parser.add_argument("--runs", type=int, default=5, help="texts")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--target", help="folder of a model, or smollm2")
    parser.add_argument("--draft", help="folder of a smaller one over the same tokens")
    given = parser.parse_args()
    torch.manual_seed(0)
    pair = load_pair(given.target, given.draft, needs_draft=False)
    schema = SCHEMA if given.schema is None else json.loads(given.schema.read_text())
    size = pair.target.config.vocab_size
    grammar = grammar_of(given.engine, schema, pair.tokenizer, size)
    ids = pair.tokenizer(given.prompt, return_tensors="pt").input_ids
    seconds, tokens, valid = {"draft": 0.0, "none": 0.0}, {"draft": 0, "none": 0}, 0
    for seed in range(given.runs):
        for name in seconds:  # by turns
            begin = time.perf_counter()
            result = specdec_ext.generate(
                pair.target, pair.drafter if name == "draft" else None, ids, grammar=grammar,
                gamma=given.gamma, temperature=given.temperature, seeds=seed,
                max_new_tokens=given.max_new_tokens,
            )  # fmt: skip
            seconds[name] += time.perf_counter() - begin
            tokens[name] += result.statistics.emitted
            if name == "draft":
                text = text_of(result.sequences[0], ids, pair.tokenizer)
                valid += is_valid(text, schema)
                if seed < 5:
                    print(text)
    rates = {name: tokens[name] / seconds[name] for name in seconds}
    print(
        f"valid: {valid} of {given.runs}; {rates['draft']:.0f} tokens a second with the draft, "
        f"{rates['none']:.0f} without ({rates['draft'] / rates['none']:.2f}x)"
    )
    return int(valid < given.runs)


if __name__ == "__main__":
    raise SystemExit(main())
