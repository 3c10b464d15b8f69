"""What readers of chapter 03 really hand in, and what each of them is told."""

import numpy as np
import pytest
import torch
from workbook.ch03_exercises import fault_of_validation, kept, peak_bytes
from workbook.ch03_three_trials import DEVICES, Device, fault_of_search, three_trials
from workbook.exercises import NotSolved


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda p, s, b, o: 4 * (3 * p + max(s * b, p)), "always counts three copies"),
        (lambda p, s, b, o: 4 * (p * o + max(s * b, p)), "leaves out the parameters themselves"),
        (lambda p, s, b, o: 4 * (p * (1 + o) + max(s * b / 2, p)), "has only half of the activations"),
        (lambda p, s, b, o: 4 * (p * (1 + o) + p + s * b / 2), "all gradients and half of the activations"),
        (lambda p, s, b, o: 4 * (p * (2 + o) + s * b), "adds all that the step ever holds"),
        (lambda p, s, b, o: 4 * (4 * p + s * b), "always counts two optimizer copies"),
        (lambda p, s, b, o: 4 * (p + s * b), "leaves out the optimizer's state"),
        (lambda p, s, b, o: 4 * (p * (1 + o) + s * b), "is the end of the forward pass"),
        (lambda p, s, b, o: 4 * p * (2 + o), "is the optimizer's step"),
        (lambda p, s, b, o: 4 * (p * (1 + o) + max(s * b, p if o else 0)), "SGD's step holds them, too"),
        (lambda p, s, b, o: 4 * (p * (1 + o) + max(s * b, o * p // 2)), "half as large as the optimizer's copies"),
        (lambda p, s, b, o: 4 * (p * (1 + o) + (s * b if b > 1 else p)), "no activations where the batch is a single"),
    ],
)
def test_peaks_by_hand(answer, message):
    def by_hand(num_parameters, saved_numbers_per_sample, batch_size, optimizer_copies):
        return answer(num_parameters, saved_numbers_per_sample, batch_size, optimizer_copies)

    with pytest.raises(NotSolved, match=message):
        peak_bytes.check(by_hand)


def validation(keep="loss.item()", keep_batch="number", after="", before="pass", guard="True"):
    """The natural loop, as a reader writes it; the arguments are pieces of its code."""
    code = f"""
def validate(model, batches):
    losses, worst = [], None
    with torch.set_grad_enabled({guard}):
        for number, batch in enumerate(batches):
            {before}
            loss = model(batch).square().mean()
            losses.append({keep})
            if losses[-1] >= max(losses):
                worst = {keep_batch}
            {after or "pass"}
    return {{"losses": losses, "worst": worst}}
"""
    names = {"torch": torch}
    exec(code, names)
    return names["validate"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (validation(), "one graph outlives its batch.*`del` of each such name helps"),
        (validation(keep="loss"), "the list still holds each loss"),
        (validation(keep="loss", keep_batch="batch"), "`del` drops a name; the list still holds the loss"),
        (validation(keep="loss.detach()", after="del loss"), "`losses` holds tensors. Numbers were asked for"),
        (validation(keep="loss.data", after="del loss"), "`losses` holds tensors. Numbers were asked for"),
        (validation(keep="loss", guard="False"), "`losses` holds tensors. Numbers were asked for"),
        (validation(keep="loss.clone()"), "A clone is one more node"),
        (validation(keep_batch="batch.clone()", after="del loss"), "`worst` is a copy of a batch"),
        (validation(keep_batch="batch", after="del loss"), "a whole batch is. Its number tells as much"),
        (validation(keep_batch="torch.tensor(number)", after="del loss"), "should be a number, got a tensor"),
        (validation(keep_batch="number + 1", after="del loss"), "the first batch has the number 0"),
        (validation(keep_batch="losses[-1]", after="del loss"), "the number of the batch with the largest loss"),
        (validation(keep="round(loss.item())", after="del loss"), "`losses` should be"),
        (lambda model, batches: None, "returned nothing"),
        (lambda model, batches: [0.0], 'must return a dict of "losses" and "worst" alone, got list'),
    ],
)
def test_validation_loops(answer, message):
    with pytest.raises(NotSolved, match=message):
        kept.check(answer)


def loop_with(first, last=""):
    """A loop that is right but for what it does to the model or the process before and after it."""
    code = f"""
def validate(model, batches):
    {first}
    losses, worst = [], None
    for number, batch in enumerate(batches):
        with torch.no_grad():
            loss = model(batch).square().mean().item()
        losses.append(loss)
        if loss >= max(losses):
            worst = number
    {last or "pass"}
    return {{"losses": losses, "worst": worst}}
"""
    names = {"torch": torch}
    exec(code, names)
    return names["validate"]


def freed_by_backward(model, batches):
    losses, worst = [], None
    for number, batch in enumerate(batches):
        loss = model(batch).square().mean()
        loss.backward()
        losses.append(loss.item())
        del loss
        if losses[-1] >= max(losses):
            worst = number
    return {"losses": losses, "worst": worst}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (loop_with("torch.set_grad_enabled(False)"), "Gradients are switched off afterwards"),
        (loop_with("model.requires_grad_(False)"), "other parameters require a gradient"),
        (loop_with("model.eval()"), "its layers are in evaluation mode"),
        (freed_by_backward, "its parameters have other gradients"),
        # These put back what a model usually is, and not what this one was.
        (loop_with("model.eval()", "model.train()"), "its layers are in training mode"),
        (loop_with("model.requires_grad_(False)", "model.requires_grad_(True)"), "other parameters require a gradient"),
        (loop_with("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"), "Gradients are switched on after"),
        (loop_with("model.zero_grad()"), "its parameters have other gradients"),
    ],
)
def test_what_a_validation_loop_must_leave_as_it_was(answer, message):
    with pytest.raises(NotSolved, match=message):
        kept.check(answer)
    assert torch.is_grad_enabled()


def test_validation_loops_that_put_everything_back_pass(capsys):
    kept.check(loop_with("modes = [m.training for m in model.modules()]; model.eval()", PUT_BACK))
    assert "solved" in capsys.readouterr().out


PUT_BACK = "[module.__setattr__('training', mode) for module, mode in zip(model.modules(), modes)]"


def test_validation_loops_that_are_right():
    assert fault_of_validation(validation(after="del loss")) is None
    assert fault_of_validation(validation(guard="False")) is None
    assert fault_of_validation(validation(before="loss = None")) is None


def search(points="usual // 2, usual", answer="size", run_it=True):
    """A line through two sizes; the arguments are pieces of its code."""
    code = f"""
def find(run, limit, usual):
    low, high = {points}
    at_low, at_high = run(low), run(high)
    size = high + (limit - at_high) * (high - low) // (at_high - at_low)
    size = {answer}
    {"run(size)" if run_it else ""}
    return size
"""
    names = {"np": np}
    exec(code, names)
    return names["find"]


def binary(run, limit, usual):
    fits, too_large = 1, 10_000
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        try:
            run(middle)
            fits = middle
        except MemoryError:
            too_large = middle
    return fits


def halving(run, limit, usual):
    size = limit
    while True:
        try:
            run(size)
            return size
        except MemoryError:
            size //= 2


def with_a_slash(run, limit, usual):
    low, high = run(usual // 2), run(usual)
    size = usual + (limit - high) / ((high - low) / (usual - usual // 2))
    run(size)
    return size


def slope_by(half, to_int):
    def find(run, limit, usual):
        low, high = run(usual // 2), run(usual)
        size = to_int(usual + (limit - high) / ((high - low) / half(usual)))
        run(size)
        return size

    return find


def float_at_the_end(run, limit, usual):
    size = search()(run, limit, usual)
    return float(size)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (search("1, 2"), "The line through 1 and 2|the line through 1 and 2 promised 13815.*lies on another line"),
        (search("1, usual"), "lies on another line"),
        (search("usual, 2 * usual"), "nothing says that twice the usual size fits"),
        (search("usual, usual + 1"), "nothing says that one more than the usual size fits"),
        (search("usual // 4, usual"), "another moment is the worst"),
        (slope_by(lambda usual: usual / 2, int), "leaves .* bytes free|is one too few|a larger batch fits"),
        (slope_by(lambda usual: usual - usual // 2, round), "it is one too many"),
        (search("1, 100"), "nothing that was measured said that it would fit"),
        (search(answer="size + 1"), "it is one too many"),
        (search(answer="size - 1"), "is one too few"),
        (search(answer="int(0.95 * size)"), "A margin is wise on a real device"),
        (search(run_it=False), "was never run. So far it is a prediction"),
        (with_a_slash, "a batch size is a whole number of at least 1"),
        (float_at_the_end, "the answer is 100.0, and a batch size is a whole number"),
        (binary, "find the limit by errors"),
        (halving, "find the limit by errors"),
        (lambda run, limit, usual: usual, "was never run, and 100 is the largest that fits"),
        (lambda run, limit, usual: run(usual) and usual, "and a larger batch fits"),
    ],
)
def test_searches(answer, message):
    with pytest.raises(NotSolved, match=message):
        three_trials.check(answer)


def test_a_flat_step_is_named():
    def only_here(run, limit, usual):
        # Right wherever 1 and 2 are on the line, and on the first device where they are not.
        return search("1, 2" if limit == 5_420_000 else "usual // 2, usual")(run, limit, usual)

    assert "There the optimizer's step is the worst moment" in fault_of_search(only_here)


def test_other_right_searches_pass():
    assert fault_of_search(search("usual - 1, usual")) is None
    assert fault_of_search(search("usual - usual // 2, usual")) is None
    assert fault_of_search(search(answer="np.int64(size)")) is None


@pytest.mark.parametrize("settings", DEVICES)
def test_the_largest_size_is_the_largest(settings):
    device = Device(**settings)
    assert device.held(device.largest()) <= device.limit < device.held(device.largest() + 1)
    const, per_sample = device.backward
    assert device.held(device.usual // 2) == const + per_sample * (device.usual // 2)


def test_a_device_has_its_limit():
    device = Device(step=(50, 0), backward=(0, 10), limit=100, usual=8)
    assert (device.run(1), device.run(8)) == (50, 80)
    with pytest.raises(MemoryError, match="a batch of 11 holds 110 bytes, the limit is 100"):
        device.run(11)
    assert (device.tried, device.errors()) == ([1, 8, 11], [11])
