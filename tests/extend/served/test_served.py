"""Tasks through a running server: what it answers is scored, and a prompt that it did not read
whole is no measurement."""

import json
import re
import socket
import time

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from posenc.extend.served import completions
from posenc.extend.served.tasks import parse_served_task_names
from tests.extend.served.small_server import completion, serving
from tests.tokenizers_of_tests import trained

TEXT = "The cat sat on the mat, and then it went to the garden to look for mice. " * 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a tokenizer that begins each text with a start token."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    file = trained(folder.parent / "tokenizer.json", TEXT, 300)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<s>")
    tokenizer.backend_tokenizer.post_processor = start_token(tokenizer)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "text.txt").write_text(TEXT)
    return folder


def start_token(tokenizer):
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])


@pytest.fixture(scope="module")
def tokenizer(folder):
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture
def ask(folder, call):
    """Ask the server at an address on the command line; return exit code, stdout and stderr."""

    def run(address, *more):
        line = ("extend", folder, "--to", "512", "--text", folder / "text.txt")
        return call(*map(str, line), "--server", address, "--task-trials", "1", *more)

    return run


def reader(tokenizer, sees: int = 10**9, cut: int = 10**9):
    """A function that answers the needle's question from the last `sees` tokens of a prompt, of
    which it reads `cut`."""

    def complete(prompt, num_tokens):
        ids = tokenizer(prompt)["input_ids"]
        seen = tokenizer.decode(ids[-sees:])
        name = re.search(r"number of (\w+) is$", prompt).group(1)
        found = re.search(rf"number of {name} is (\d+)\.", seen)
        return completion(f" {found.group(1)}" if found else " no", min(len(ids), cut))

    return complete


def test_depths_that_a_server_does_not_see_are_found(ask, tokenizer):
    """A server that looks at the last 200 tokens only, and counts all of them."""
    with serving(reader(tokenizer, sees=200)) as server:
        code, out, _ = ask(server.address, "--json")
    printed = json.loads(out)
    scores = {score["length"]: score for score in printed["tasks"]}
    assert code == 0 and printed["model"] == "the model"
    assert scores[512]["by_depth"] == {"0.0": 0, "0.25": 0, "0.5": 0, "0.75": 1, "1.0": 1}
    assert scores[128]["exact"]["mean"] == 1
    for length, score in scores.items():  # the answer has its room, and nearly all else is prompt
        assert length - 40 < score["tokens_read"][0] <= score["tokens_read"][1] < length
    assert all(a["temperature"] == 0 and a["model"] == "the model" for a in server.asked)


def test_a_served_model_is_asked_what_it_answers(ask, folder, tokenizer):
    """The tokens that transformers generates are those that the scores are made of."""
    model = AutoModelForCausalLM.from_pretrained(folder)

    def complete(prompt, num_tokens):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        return completion(tokenizer.decode(made[0, ids.shape[1] :]), ids.shape[1])

    with serving(complete, [{"id": "other"}, {"id": str(folder)}]) as server:
        code, out, _ = ask(server.address, "--task", "needle")
    assert code == 0 and "needle: 0% at 64 tokens" not in out
    assert "does not answer it at any length" in out  # its weights are random
    assert "read each of" in out and {a["model"] for a in server.asked} == {str(folder)}


@pytest.mark.parametrize(
    ("cut", "said"), [(100, "read 100 tokens of a prompt of"), (0, "it cuts prompts")]
)
def test_a_prompt_that_is_cut_is_no_measurement(ask, tokenizer, cut, said):
    with serving(reader(tokenizer, cut=cut)) as server:
        code, out, err = ask(server.address)
    assert code == 1 and not out and said in err and err.count("\n") == 1


def test_a_server_that_adds_to_prompts_is_not_measured(ask, tokenizer):
    def complete(prompt, num_tokens):
        return completion("", len(tokenizer(prompt)["input_ids"]) + 1)

    with serving(complete) as server:
        code, _, err = ask(server.address)
    assert code == 1 and "has another tokenizer" in err and err.count("\n") == 1


NONSENSE = {
    "no JSON": (b"<html>hello</html>", "is it an OpenAI-compatible server?"),
    "a list": ([1, 2], "expected a JSON object"),
    "no text": ({"choices": [], "usage": {"prompt_tokens": 5}}, "expected choices[0].text"),
    "a number": (completion(7, 5), "expected choices[0].text"),
    "no count": ({"choices": [{"text": "a"}]}, "has no usage.prompt_tokens"),
    "a word": (completion("a", "five"), "has no usage.prompt_tokens"),
    "refusal": ((400, {"error": {"message": "too long: 4096"}}), "refuses (400): too long: 4096"),
    "detail": ((422, {"detail": "no such model"}), "refuses (422): no such model"),
    "bare": ((500, b"\x1b[31mdown\n\n"), "refuses (500): ?[31mdown"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_one_sentence(ask, name):
    answer, said = NONSENSE[name]
    with serving(lambda prompt, num_tokens: answer) as server:
        code, out, err = ask(server.address)
    assert code == 1 and not out and said in err and err.count("\n") == 1, err


@pytest.mark.parametrize("where", ["models", "completions"])
def test_a_server_that_hangs_is_left(ask, monkeypatch, where):
    monkeypatch.setattr(completions, "SECONDS_TO_CONNECT", 0.3)
    monkeypatch.setattr(completions, "SECONDS_TO_ANSWER", 0.3)

    def wait(handler):
        if handler.path.endswith(where):
            for _ in range(40):  # a byte now and then keeps a plain timeout from ending it
                handler.wfile.write(b"H")
                time.sleep(0.05)

    with serving(lambda prompt, num_tokens: completion("", 0), before=wait) as server:
        start = time.monotonic()
        code, _, err = ask(server.address)
    assert code == 1 and "within 0.3 seconds" in err and err.count("\n") == 1
    assert time.monotonic() - start < 20


def test_nobody_answers(ask):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, _, err = ask(address)
    assert code == 1 and "no server answers there" in err and err.count("\n") == 1


def test_a_redirect_is_not_followed(ask):
    """It may lead to a server that nobody named."""

    def elsewhere(handler):
        handler.send(302, {}, Location="http://example.org/v1")

    with serving(lambda prompt, num_tokens: {}, before=elsewhere) as server:
        code, _, err = ask(server.address)
    assert code == 1 and "redirects to http://example.org/v1, which is not followed" in err


def test_a_server_with_a_smaller_limit_is_refused_before_it_is_asked(ask):
    with serving(lambda *_: {}, [{"id": "m", "max_model_len": 256}]) as server:
        code, _, err = ask(server.address)
    assert code == 2 and "serves 256 tokens, and --to is 512" in err and not server.asked


BAD = {
    "no address": (("localhost:8000",), "must be the address of a server"),
    "a file": (("file:///etc/passwd",), "must be the address of a server"),
    "a port": (("http://localhost:99999",), "must be the address of a server"),
    "a name in it": (("http://user:word@localhost:1",), "must be the address of a server"),
    "passkey": (("http://localhost:1", "--task", "passkey"), "a server is asked in words"),
    "none": (("http://localhost:1", "--task", "none"), "a server is asked in words"),
    "out": (("http://localhost:1", "--out", "new"), "--out: --server asks the tasks"),
    "windows": (("http://localhost:1", "--windows", "3"), "--windows: --server asks"),
    "plan": (("http://localhost:1", "--plan"), "--plan: --server asks"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_server_cannot_be_asked_is_refused(ask, name):
    arguments, said = BAD[name]
    code, _, err = ask(*arguments)
    assert code == 2 and said in err, err


def test_a_needle_is_the_task_unless_another_is_named():
    assert parse_served_task_names(None) == ("needle",)
    assert parse_served_task_names(["variables", "needle_by_meaning"]) == (
        "variables",
        "needle-by-meaning",
    )
