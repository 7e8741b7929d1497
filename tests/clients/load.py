#!/usr/bin/env python3
"""Measures a running server under load, with nothing but Python.

    cargo run --release -- serve --lanes 64 &
    python3 tests/clients/load.py --url http://127.0.0.1:8080 --clients 1,4,16,64

Each client sends one request after the other to `/v1/completions` and reads the answer as it is
streamed. Prompts are token ids that are drawn, the same ones in every run. A line of JSON for each
number of clients has requests and tokens by the second, the time to the first token, and for each
answer the time from its first token to its last, by the tokens in between; 50 and 99 of 100 are
below what is given. Requests of a warm-up come before and are not counted. It ends with exit code 1
if a request has failed.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

# One is enough for some ten thousand tokens a second.
MOST_PROCESSES = 8


def percentile(values, share):
    """The least of the values that so many of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)] if ordered else None


class Connection:
    """A connection that is used again."""

    def __init__(self, options):
        self.options = options
        self.reader = self.writer = None

    async def post(self, body):
        """Yields the data of each event of the answer."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(
                self.options.host, self.options.port
            )
        body = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: load\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        status = await self.reader.readline()
        while (await self.reader.readline()).strip():
            pass
        if b" 200 " not in status:
            self.close()
            raise OSError(status.decode().strip())
        text = b""
        while size := int(await self.reader.readline(), 16):
            text += (await self.reader.readexactly(size + 2))[:-2]
            *events, text = text.split(b"\n\n")
            for event in events:
                if event.startswith(b"data: "):
                    yield event[6:]
        await self.reader.readline()

    def close(self):
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


async def ask(connection, draw, options):
    """Sends a request; the seconds to its first token, those between tokens, and its tokens."""
    low, high = options.prompt
    ids = [draw.randrange(16, options.vocabulary) for _ in range(draw.randint(low, high))]
    body = {
        "prompt": ids,
        "max_tokens": draw.randint(*options.tokens),
        "temperature": 1,
        "seed": draw.randrange(1 << 31),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first, last, usage, ended = time.monotonic(), None, None, None, False
    async for data in connection.post(body):
        now = time.monotonic()
        if data == b"[DONE]":
            ended = True
        elif data.startswith(b'{"error"'):
            raise OSError(data.decode())
        elif b'"choices":[]' in data:
            usage = json.loads(data)["usage"]
        else:
            first = first or now
            last = now
    if not ended or usage is None or first is None:
        raise OSError("the answer is not whole")
    tokens = usage["completion_tokens"]
    between = (last - first) / (tokens - 1) if tokens > 1 else None
    return first - start, between, len(ids), tokens


async def client(number, count, options):
    draw, connection = random.Random(number), Connection(options)
    answers, failures = [], []
    for _ in range(count):
        try:
            answers.append(await ask(connection, draw, options))
        except (OSError, EOFError, ValueError) as error:
            failures.append(repr(error))
            connection.close()
    connection.close()
    return answers, failures


async def clients(numbers, count, options):
    return await asyncio.gather(*(client(number, count, options) for number in numbers))


def process(numbers, count, options):
    return asyncio.run(clients(numbers, count, options))


def measure(pool, number, count, options):
    """What so many clients at once see, with so many requests each."""
    groups = [range(number)[start :: options.processes] for start in range(options.processes)]
    start = time.monotonic()
    calls = [pool.apply_async(process, (group, count, options)) for group in groups if group]
    results = [result for call in calls for result in call.get()]
    seconds = time.monotonic() - start
    answers = [answer for answers, _ in results for answer in answers]
    failures = [failure for _, failures in results for failure in failures]
    firsts, betweens, prompts, tokens = zip(*answers) if answers else [()] * 4
    betweens = [between for between in betweens if between is not None]

    def milliseconds(values):
        of = {f"p{share}": percentile(values, share) for share in (50, 99)}
        return {name: value and round(1000 * value, 3) for name, value in of.items()}

    return {
        "clients": number,
        "requests": len(answers),
        "failed": len(failures),
        "first_failure": failures[0] if failures else None,
        "seconds": round(seconds, 2),
        "requests_per_second": round(len(answers) / seconds, 2),
        "tokens_per_second": round(sum(tokens) / seconds, 1),
        "prompt_tokens_per_second": round(sum(prompts) / seconds, 1),
        "first_token_ms": milliseconds(firsts),
        "token_ms": milliseconds(betweens),
    }


def await_ready(url):
    """Waits until the server has compiled its kernels."""
    while True:
        try:
            urllib.request.urlopen(url + "/health").close()
            return
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(0.5)


def bounds(text):
    low, high = (int(part) for part in text.split(":"))
    return low, high


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--clients", default="1,4,16,64", help="numbers of clients at once")
    parser.add_argument("--requests", type=int, default=32, help="of each client")
    parser.add_argument("--prompt", type=bounds, default="16:512", help="least and most tokens")
    parser.add_argument("--tokens", type=bounds, default="16:256", help="of an answer, the same")
    parser.add_argument("--vocabulary", type=int, default=1000, help="ids of prompts are below")
    parser.add_argument("--warm-up", type=int, default=2, help="requests of each client before")
    parser.add_argument("--label", help="is added to each line")
    options = parser.parse_args()
    address = urlsplit(options.url)
    options.host, options.port = address.hostname, address.port
    numbers = [int(number) for number in options.clients.split(",")]
    options.processes = min(MOST_PROCESSES, os.cpu_count(), max(numbers))
    await_ready(options.url)
    failed = False
    with multiprocessing.Pool(options.processes) as pool:
        for number in numbers:
            measure(pool, number, options.warm_up, options)
            line = measure(pool, number, options.requests, options)
            line = {"label": options.label, **line} if options.label else line
            print(json.dumps(line), flush=True)
            failed |= line["failed"] > 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
