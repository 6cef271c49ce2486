"""The models that are asked by default exist."""
from typing import get_args

import anthropic.types
import openai.types
import pytest
from anthropic.resources.messages.messages import DEPRECATED_MODELS

import models

LISTS = {"openai": openai.types.ChatModel, "anthropic": anthropic.types.Model}  # of the others there is none to read


def names(type):
    """What is in a Literal, or in those of a Union."""
    return {name for part in get_args(type) for name in ([part] if isinstance(part, str) else names(part))}


@pytest.mark.parametrize("provider", LISTS)
def test_the_default_model_is_in_the_list_of_the_sdk(provider):
    known = names(LISTS[provider])
    assert len(known) > 10 and models.choose({}, provider).model in known - set(DEPRECATED_MODELS)
