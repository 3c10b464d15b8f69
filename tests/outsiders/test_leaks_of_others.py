"""watch_growth on the cache of keys and values that transformers keeps from token to token."""

import torch
import transformers

from course_lib.leaks import watch_growth


def generating(keep):
    config = dict(n_embd=32, n_layer=3, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, **config)).eval()
    past = transformers.DynamicCache()

    @torch.no_grad()
    def step():
        nonlocal past
        output = model(torch.randint(0, 50, (1, 1)), past_key_values=past, use_cache=True)
        past = output.past_key_values if keep else transformers.DynamicCache()

    return step


def test_a_cache_of_keys_and_values_is_seen():
    (culprit,) = watch_growth(generating(keep=True)).culprits
    print(culprit)
    assert culprit.kind == "tensors" and "gets longer" in culprit.what
    assert culprit.per_step_bytes == 3 * 2 * 32 * 4
    assert watch_growth(generating(keep=False)).ok
