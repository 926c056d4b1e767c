"""Sampling parameters: what is accepted, and the one sentence for what is not."""

import pytest

from kvjax.errors import RequestError
from kvjax.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")


def test_defaults_are_greedy_and_valid():
    params = SamplingParams()
    assert params.validate(100) is params
    assert (params.temperature, params.top_k, params.top_p, params.max_new_tokens) == (0.0, 0, 1.0, 256)
    assert not params.penalizes


def test_containers_are_normalised():
    params = SamplingParams.from_dict({"stop": "\n", "stop_token_ids": [3, 4], "logit_bias": {"7": -1, 8: 2.5}})
    assert params.stop == ("\n",)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {7: -1, 8: 2.5}
    assert SamplingParams.from_dict({"stop": ["a", "b"]}).stop == ("a", "b")
    assert params.validate(9) == params


def test_openai_spelling_and_null():
    params = SamplingParams.from_dict({"max_tokens": 5, "stop": None, "top_p": None, "seed": None})
    assert params == SamplingParams(max_new_tokens=5)
    with pytest.raises(RequestError, match=r"^max_new_tokens is given twice, also as max_tokens: give one of them\.$"):
        SamplingParams.from_dict({"max_new_tokens": 5, "max_tokens": 5})


def test_unknown_fields_name_the_nearest():
    with pytest.raises(RequestError, match=r"^temprature is not a sampling parameter: did you mean temperature\?$"):
        SamplingParams.from_dict({"temprature": 1})
    with pytest.raises(RequestError, match=r"^xyz is not a sampling parameter: the known ones are max_new_tokens, "):
        SamplingParams.from_dict({"xyz": 1})


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalizes(field):
    assert SamplingParams.from_dict({field: 1.5}).penalizes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0: give a whole number at least 1 and at most 2147483647."),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5: give a whole number at least 1."),
        ({"max_new_tokens": True}, "max_new_tokens is True: give a whole number at least 1."),
        ({"max_new_tokens": "5"}, "max_new_tokens is '5': give a whole number at least 1."),
        (
            {"max_new_tokens": 2, "min_new_tokens": 3},
            "min_new_tokens is 3, more than max_new_tokens, 2: lower the one or raise the other.",
        ),
        ({"temperature": -0.1}, "temperature is -0.1: give a number at least 0."),
        ({"temperature": NAN}, "temperature is nan: give a finite number at least 0."),
        ({"temperature": INF}, "temperature is inf: give a finite number at least 0."),
        ({"temperature": 1e-9}, "temperature is 1e-09: give 0 for greedy decoding, or at least 1e-05."),
        ({"temperature": "hot"}, "temperature is 'hot': give a finite number at least 0."),
        ({"top_k": -1}, "top_k is -1: give a whole number at least 0 and at most 2147483647."),
        ({"top_p": 0}, "top_p is 0: give a number over 0 and at most 1."),
        ({"top_p": 1.1}, "top_p is 1.1: give a number over 0 and at most 1."),
        ({"min_p": 1.1}, "min_p is 1.1: give a number at least 0 and at most 1."),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: give a number over 0."),
        ({"presence_penalty": NAN}, "presence_penalty is nan: give a finite number."),
        ({"frequency_penalty": False}, "frequency_penalty is False: give a finite number."),
        ({"logit_bias": [1]}, "logit_bias is [1]: give a mapping from token id to number."),
        (
            {"logit_bias": {100: 1.0}},
            "logit_bias contains 100: give token ids from 0 to 99, the model's vocabulary.",
        ),
        (
            {"logit_bias": {"-1": 1.0}},
            "logit_bias contains '-1': give token ids from 0 to 99, the model's vocabulary.",
        ),
        ({"logit_bias": {3: INF}}, "logit_bias of token 3 is inf: give a finite number."),
        ({"stop": ["a", ""]}, 'stop contains the empty string "", which would end every output at once: remove it.'),
        ({"stop": 3}, "stop is (3,): give a string or a list of strings."),
        ({"stop": b"x"}, "stop is b'x': give a string or a list of strings."),
        ({"stop": "\ud800"}, "stop contains '\\ud800', half of a surrogate pair, which is not text: remove it."),
        ({"stop_token_ids": [-1]}, "stop_token_ids contains -1: give token ids from 0 to 99, the model's vocabulary."),
        ({"stop_token_ids": {}}, "stop_token_ids is {}: give a list of token ids."),
        ({"ignore_eos": 1}, "ignore_eos is 1: give true or false."),
        ({"logprobs": True}, "logprobs is True: give a whole number at least 0 and at most 20."),
        ({"logprobs": 21}, "logprobs is 21: give a whole number at least 0 and at most 20."),
        ({"seed": -1}, "seed is -1: give a whole number at least 0 and at most 4294967295."),
        ({"n": 0}, "n is 0: give a whole number at least 1 and at most 4096."),
    ],
    ids=str,
)
def test_refusals_name_field_value_and_remedy(fields, message):
    with pytest.raises(RequestError) as error:
        SamplingParams.from_dict(fields).validate(100)
    assert str(error.value) == message
