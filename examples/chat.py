"""A chat with a draft: the tokenizer's chat template makes the prompt, text appears as it comes.

    python -m specdec_ext fetch smollm2
    python examples/chat.py "What is a draft?" "Write that as a list." --target smollm2
    python examples/chat.py "What is a draft?" "And why is it fast?" --target TARGET --draft DRAFT

TARGET and DRAFT are instruct models of one family, with one tokenizer; a target alone copies from
the conversation (`SuffixDrafter`). Without either the small pair of specdec-ext-pair answers, which
has no chat template and was taught Python, not conversation.
"""

import argparse

from transformers import TextStreamer

import specdec_ext
from specdec_ext.commands.pair import load_pair
from specdec_ext.decoding import RenewalRule

#: For a tokenizer that brings none: comments, which is what conversations are among Python files.
COMMENTS = (
    "{{ bos_token }}{% for message in messages %}"
    "# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)


def reply(target, draft, tokenizer, messages, **options):
    """Answer a conversation, printing the answer as it is found; return its text and statistics."""
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with specdec_ext.hf.streaming(streamer, prompt["input_ids"]) as on_round:
        result = specdec_ext.generate(
            target, draft, prompt["input_ids"], on_round=on_round, **options
        )
    new = result.sequences[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), result.statistics


def main():
    """Ask the questions one after the other; each answer becomes part of the conversation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", default=["How does one read a file?"])
    parser.add_argument("--target", help="an instruct model: a folder, or what `fetch` got")
    parser.add_argument(
        "--draft", help="folder of a smaller one over the same tokens, or of decoding heads"
    )
    given = parser.parse_args()
    if given.draft and not given.target:
        parser.error("--draft needs --target")
    pair = load_pair(given.target, given.draft, needs_draft=False)
    tokenizer, drafter = pair.tokenizer, pair.drafter  # copies of the text without a draft
    if tokenizer.chat_template is None:
        tokenizer.chat_template = COMMENTS
    # What these have seen of texts and models, they keep from turn to turn.
    policy = RenewalRule()
    messages = []
    for seed, question in enumerate(given.questions):
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        answer, statistics = reply(
            pair.target, drafter, tokenizer, messages, gamma=policy, max_new_tokens=96,
            temperature=0.7, top_p=0.9, seeds=seed,
        )  # fmt: skip
        messages.append({"role": "assistant", "content": answer})
        print(f"[{statistics.tokens_per_target_call:.2f} tokens a target call]")


if __name__ == "__main__":
    main()
