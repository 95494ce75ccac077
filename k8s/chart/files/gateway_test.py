"""Run by `helm test`: the gateway is ready and completes a prompt. Arguments: URL, model, seconds, file of API keys."""

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

url, model, patience_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
headers = {"Content-Type": "application/json"}
if len(sys.argv) > 4:
    lines = (line.strip() for line in Path(sys.argv[4]).read_text("utf-8").splitlines())
    key = next(line for line in lines if line and not line.startswith("#")).split(":", 1)[1].strip()
    headers["Authorization"] = f"Bearer {key}"


def ask(path, body=None):
    """The answer's body; exits with the server's words when it refuses."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers=headers)  # noqa: S310 - the chart's own URL
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        return response.read()


def attempt():
    """One completion of four tokens."""
    ask("/ready")
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
    answer = json.loads(ask("/v1/completions", body))
    choice, tokens = answer["choices"][0], answer["usage"]["completion_tokens"]
    if not (0 < tokens <= 4 and choice["finish_reason"] in {"length", "stop"}):
        sys.exit(f"a strange completion: {answer}")
    return f"completed {tokens} tokens, finish {choice['finish_reason']}: {choice['text']!r}\n"


deadline_s = time.monotonic() + patience_s
while True:
    try:
        sys.stdout.write(attempt())
        break
    except urllib.error.HTTPError as error:
        trouble = f"{error.url} answered {error.code}: {error.read().decode(errors='replace')[:500]}"
        if error.code not in {429, 503} or time.monotonic() > deadline_s:
            sys.exit(trouble)
    except OSError as error:
        trouble = f"{url} cannot be reached: {error}"
        if time.monotonic() > deadline_s:
            sys.exit(trouble)
    time.sleep(2)
