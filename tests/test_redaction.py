from __future__ import annotations

import pytest

from mrl.redaction import is_secret_key, redact, redact_text

ENVIRONMENT = {
    "HF_TOKEN": "tok-in-env-1",
    "MY_SECRET": "short",
    "HOME": "/root",
    "RAY_AUTH_TOKEN_PATH": "/etc/hostname",
}


SECRET = "token hub_token HF_TOKEN api_key WANDB_API_KEY secret aws_secret_key password db.passwd credentials auth"
ORDINARY = "max_tokens_per_device tokenizer pad_token eos_token stop_token key author keyboard token_level_rewards"


def test_secret_keys_are_told_from_ordinary_ones() -> None:
    assert [key for key in f"{SECRET} {ORDINARY}".split() if is_secret_key(key)] == SECRET.split()


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("login with tok-in-env-1 failed", "login with <redacted:HF_TOKEN> failed"),
        (
            "short words stay, even where an environment secret is one",
            "short words stay, even where an environment secret is one",
        ),
        ("hf_abcdefghijklmnopqrstuvwxyz", "<redacted>"),
        ("key=sk-abcdefghijklmnop1234", "key=<redacted>"),
        ("https://user:pa55word@host/path", "https://<redacted>@host/path"),
        ("Authorization: Bearer abcdef0123456789", "Authorization: Bearer <redacted>"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123 and AKIAABCDEFGHIJKLMNOP", "<redacted> and <redacted>"),
        ("https://host:8080/path@2 stays", "https://host:8080/path@2 stays"),
        ("ask http://judge/v1?api_key=opensesame&n=2 now", "ask http://judge/v1?api_key=<redacted>&n=2 now"),
        ("s3://b/x?X-Amz-Signature=ab%2F&part=1#top", "s3://b/x?X-Amz-Signature=<redacted>&part=1#top"),
        ("'https://h/?a=1&key=k&sig=s&max_tokens=9'", "'https://h/?a=1&key=<redacted>&sig=<redacted>&max_tokens=9'"),
        ("no url: where?key=3&token=4", "no url: where?key=3&token=4"),
    ],
)
def test_text(text: str, clean: str) -> None:
    assert redact_text(text, ENVIRONMENT) == clean


def test_trees_keep_their_shape_and_their_numbers() -> None:
    tree = {"api_key": "abc", "token": None, "auth": True, "nested": [{"password": "x"}], "max_token": 5, "name": "run"}
    assert redact(tree) == {
        "api_key": "<redacted>",
        "token": None,
        "auth": True,
        "nested": [{"password": "<redacted>"}],
        "max_token": 5,
        "name": "run",
    }
