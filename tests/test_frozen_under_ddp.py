"""DDP asks once what is trained. What is unfrozen later stays each rank's own, without a word."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.accumulation import accumulate
from course_lib.launch import RankError, run_ranks
from course_lib.skipping import StepGuard


def small_net(frozen):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    net[0].requires_grad_(not frozen)
    return net


def train_in_a_loop(rank, kind, frozen_first):
    net = small_net(frozen_first)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    guard = StepGuard(model, optimizer) if kind == "guarded" else None
    generator = torch.Generator().manual_seed(rank)
    for window in range(3):
        if window == 1:
            net[0].requires_grad_(True)
        batch = torch.randn(4, 3, generator=generator)
        optimizer.zero_grad()
        if kind == "accumulate":
            accumulate(model, [batch], lambda model, batch: model(batch).square().sum(), len)
            optimizer.step()
        else:
            loss = model(batch).square().mean()
            if guard is None:
                loss.backward()
                optimizer.step()
            else:
                guard.backward(loss)
                guard.step()
    return net[0].weight.detach().clone()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["accumulate", "guarded"])
def test_a_loop_refuses_what_ddp_never_reduces(kind):
    apart, together = (
        run_ranks(train_in_a_loop, 2, args=("plain", frozen_first), timeout=120) for frozen_first in (True, False)
    )
    assert not torch.equal(apart[0].value, apart[1].value)  # what nobody says
    assert torch.equal(together[0].value, together[1].value)
    with pytest.raises(RankError, match=r"0\.weight was frozen when DistributedDataParallel wrapped the model"):
        run_ranks(train_in_a_loop, 2, args=(kind, True), timeout=120)
    first, second = run_ranks(train_in_a_loop, 2, args=(kind, False), timeout=120)
    assert torch.equal(first.value, second.value)
    [alone] = run_ranks(train_in_a_loop, 1, args=(kind, True), timeout=120)
    assert not torch.equal(alone.value, small_net(True)[0].weight)
