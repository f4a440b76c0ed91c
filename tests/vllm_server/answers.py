"""Checks that compare the answers of a server with those of transformers and tokensieve under the same plan."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.vllm_server.reporting import report
from tests.vllm_server.server import Client, Server, Stream, ask

MIN_EQUAL = 0.99
MARGIN = 0.02  # between the log-probabilities of the two likeliest words, below which rounding may decide
SOME = 24  # questions, where not all are asked
STREAMED = 32  # tokens of a reply that is streamed


def check_answers(server: Server, data: dict[str, Any], plan: str) -> None:
    questions, expected = data["questions"], data["answers"][plan]["one"]

    async def work(client: Client) -> list[str]:
        return await asyncio.gather(*(client.answer([each["image"]], each["question"]) for each in questions))

    begin = time.monotonic()
    answers = ask(server, work)
    seconds = time.monotonic() - begin
    differ = [number for number, (a, b) in enumerate(zip(answers, expected, strict=True)) if a != b]
    unexplained = [number for number in differ if not is_near_tie(server, questions[number])]
    right = sum(a == each["answer"] for a, each in zip(answers, questions, strict=True))
    share = 1 - len(differ) / len(questions)
    detail = f"{len(questions) - len(differ)} of {len(questions)} equal to transformers, {right} right, {seconds:.0f} s"
    for number in differ:
        detail += f"\n         {number}: {answers[number]!r}, not {expected[number]!r}"
    report(f"answers under {plan}", share >= MIN_EQUAL and not unexplained, detail)


def is_near_tie(server: Server, question: dict[str, Any]) -> bool:
    """Whether some word of an answer is hardly more likely than another, so that rounding decides."""

    async def work(client: Client) -> Any:
        return await client.ask([question["image"]], question["question"], logprobs=True, top_logprobs=2)

    words = ask(server, work).choices[0].logprobs.content
    tops = [[each.logprob for each in word.top_logprobs] for word in words]
    return any(len(top) > 1 and top[0] - top[1] < MARGIN for top in tops)


def check_two_images(server: Server, data: dict[str, Any], plan: str) -> None:
    questions, expected = data["questions"], data["answers"][plan]["two"]

    async def work(client: Client) -> list[str]:
        pairs = [([questions[n]["image"], questions[n + 1]["image"]], questions[n]["question"]) for n in range(len(expected))]
        return await asyncio.gather(*(client.answer(*pair) for pair in pairs))

    answers = ask(server, work)
    equal = sum(a == b for a, b in zip(answers, expected, strict=True))
    report(f"two images a prompt under {plan}", equal == len(expected), f"{equal} of {len(expected)} equal to transformers")


def check_streaming(server: Server, data: dict[str, Any], plan: str) -> None:
    """Replies go on behind the answer, so that each comes in many pieces, the first of them well before the last."""

    async def work(client: Client) -> list[Stream]:
        asked = data["questions"][:SOME]
        return await asyncio.gather(*(client.stream([each["image"]], each["question"], STREAMED) for each in asked))

    replies = ask(server, work)
    expected = [answer.split() for answer in data["answers"][plan]["one"][:SOME]]
    equal = sum(words == reply.text.split()[: len(words)] for reply, words in zip(replies, expected, strict=True))
    fewest = min(reply.pieces for reply in replies)
    share = sum(reply.first for reply in replies) / sum(reply.last for reply in replies)
    detail = (
        f"{equal} of {len(replies)} begin with the answer, {fewest} pieces or more, the first after {share:.0%} of the time"
    )
    report("streaming", equal == len(replies) and fewest >= STREAMED // 2 and share < 0.8, detail)


def check_caches(server: Server, data: dict[str, Any], plan: str) -> None:
    """The same images again, and with other questions: from the caches of images and of prefixes."""
    questions = data["questions"][:SOME]

    async def work(client: Client) -> list[str]:
        again = [client.answer([each["image"]], each["question"]) for each in questions]
        other = [client.answer([each["image"]], "what shape is above the circle ?") for each in questions[:8]]
        return (await asyncio.gather(*again, *other))[: len(questions)]

    before = server.metric("vllm:prefix_cache_hits_total")
    answers = ask(server, work)
    hits = server.metric("vllm:prefix_cache_hits_total") - before
    equal = sum(a == b for a, b in zip(answers, data["answers"][plan]["one"], strict=False))
    detail = f"{equal} of {len(answers)} equal when asked again, {hits:.0f} tokens from the cache"
    report("prefix caching", equal == len(answers) and hits > 0, detail)
