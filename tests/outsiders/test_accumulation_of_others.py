"""accumulate with the losses of transformers, whose causal models shift the labels themselves."""

import pytest
import torch
import transformers

from course_lib.accumulation import accumulate

WORDS = 50


def causal_model():
    torch.manual_seed(0)
    config = dict(n_embd=32, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, **config))
    return model.double().eval()  # no dropout


def micro_batch(rows, length, ignored):
    ids = torch.randint(0, WORDS, (rows, length))
    labels = ids.clone()
    labels[:, length - ignored :] = -100
    return {"input_ids": ids, "labels": labels}


def window():
    return [micro_batch(2, 12, 0), micro_batch(1, 12, 7), micro_batch(3, 12, 2), micro_batch(1, 12, 12)]


def loss_sum(model, batch):
    return model(**batch, num_items_in_batch=1).loss


def predicted_tokens(batch):
    return (batch["labels"][:, 1:] != -100).sum()


def gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_the_pair_of_the_documentation_gives_the_gradient_of_one_big_batch():
    batches, model, oracle = window(), causal_model(), causal_model()
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    mean = oracle(**whole).loss  # transformers' own mean over the tokens that are predicted
    mean.backward()
    found = accumulate(model, batches, loss_sum, predicted_tokens)
    assert found.global_count == (2 * 11 + 4 + 3 * 9)
    # The loss is computed in float32, whatever the model's dtype is.
    torch.testing.assert_close(gradient(model), gradient(oracle), rtol=1e-4, atol=1e-7)
    assert (found.loss_sum / found.global_count).item() == pytest.approx(mean.item(), rel=1e-6)


def test_a_mean_of_transformers_times_its_count_is_right_too():
    batches, model, oracle = window(), causal_model(), causal_model()
    accumulate(oracle, batches, loss_sum, predicted_tokens)
    found = accumulate(
        model, batches, lambda model, batch: model(**batch).loss * predicted_tokens(batch), predicted_tokens
    )
    assert found.loss_sum.isfinite()
    torch.testing.assert_close(gradient(model), gradient(oracle), rtol=1e-4, atol=1e-7)


def test_counting_the_labels_without_the_shift_makes_the_gradient_too_small():
    batches, model, oracle = window(), causal_model(), causal_model()
    accumulate(oracle, batches, loss_sum, predicted_tokens)
    accumulate(model, batches, loss_sum, lambda batch: (batch["labels"] != -100).sum())
    ratio = gradient(model).norm() / gradient(oracle).norm()
    assert ratio.item() == pytest.approx(53 / 59, rel=1e-6)
