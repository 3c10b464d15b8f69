"""The pieces of which training scripts are drawn: lines of Python, by what they are."""

MODELS = {
    "linear": "model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))",
    "batch norm": "model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))",
    "dropout": "model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))",
    "convolution": "model = nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(8, 3))",
    "compiled": 'model = torch.compile(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), backend="eager")',
    "two parts": """
        class Parts(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)), nn.Linear(16, 3)

            def forward(self, x):
                return self.head(self.body(x).relu())

        model = Parts()
    """,
    "called apart": """
        body, head = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)), nn.Linear(16, 3)
        model = nn.ModuleDict(dict(body=body, head=head))
    """,
    "frozen body": """
        body, head = nn.Linear(8, 16).requires_grad_(False), nn.Linear(16, 3)
        model = nn.Sequential(body, nn.ReLU(), head)
    """,
    "unfrozen later": """
        body, head = nn.Linear(8, 16), nn.Linear(16, 3)
        model = nn.Sequential(body, nn.ReLU(), head)
    """,
    "tied": """
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
                self.second.weight = self.first.weight

            def forward(self, x):
                return self.head(self.second(self.first(x).relu()))

        model = Tied()
    """,
    "recurrent": """
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.cell, self.head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 3)

            def forward(self, x):
                return self.head(self.cell(x.view(-1, 4, 2))[0][:, -1])

        model = Recurrent()
    """,
    "attention": """
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 3)

            def forward(self, x):
                return self.head(self.layer(x.view(-1, 2, 4)).mean(1))

        model = Attention()
    """,
    "checkpointed": """
        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 3)

            def forward(self, x):
                return self.head(checkpoint(self.body, x, use_reentrant=False))

        model = Checkpointed()
    """,
    "checkpointed, reentrant": """
        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 3)

            def forward(self, x):
                return self.head(checkpoint(self.body, self.first(x), use_reentrant=True))

        model = Checkpointed()
    """,
    "wrapped": """
        torch.distributed.init_process_group("gloo", **GROUP)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    """,
    "weight norm": """
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 3))
    """,
    "parameters alone": """
        class Weights(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Parameter(0.3 * torch.randn(8, 16))
                self.layers = nn.ParameterList([nn.Parameter(0.3 * torch.randn(16, 3))])

            def forward(self, x):
                return (x @ self.first).relu() @ self.layers[0]

        model = Weights()
    """,
    "low rank": """
        class LowRank(nn.Module):
            def __init__(self, layer):
                super().__init__()
                self.layer = layer.requires_grad_(False)
                self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)

            def forward(self, x):
                return self.layer(x) + self.up(self.down(x))

        model = nn.Sequential(LowRank(nn.Linear(8, 16)), nn.SiLU(), nn.Linear(16, 3))
    """,
    "own function": """
        class Squared(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x**2

            @staticmethod
            def backward(ctx, gradient):
                return 2 * ctx.saved_tensors[0] * gradient

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

            def forward(self, x):
                return self.second(Squared.apply(self.first(x)))

        model = Model()
    """,
    "half of the layers at random": """
        class Deep(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers, self.head = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)]), nn.Linear(8, 3)

            def forward(self, x):
                for layer in self.layers:
                    if not self.training or torch.rand(()) < 0.5:
                        x = x + layer(x).relu()
                return self.head(x)

        model = Deep()
    """,
    "with a queue": """
        class Queued(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
                self.register_buffer("queue", torch.zeros(12, 3))
                self.place = 0

            def forward(self, x):
                scores = self.layers(x)
                if self.training and torch.is_grad_enabled():
                    with torch.no_grad():
                        self.queue[self.place : self.place + len(x)] = scores[: 12 - self.place].float()
                        self.place = (self.place + len(x)) % 12
                return scores - self.queue.mean(0)

        model = Queued()
    """,
    "output object": """
        @dataclasses.dataclass
        class Output:
            scores: torch.Tensor
            loss: torch.Tensor | None = None

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

            def forward(self, x):
                return Output(scores=self.layers(x))

        model = Model()
    """,
    "loss inside": """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))

            def forward(self, x, y=None):
                scores = self.layers(x)
                return scores if y is None else (scores, nn.functional.cross_entropy(scores, y))

        model = Model()
    """,
}
LOSSES = {
    "cross entropy": "return nn.functional.cross_entropy(scores_of(x), y)",
    "criterion": "return nn.CrossEntropyLoss(label_smoothing=0.1)(scores_of(x), y)",
    "by hand": "return -scores_of(x).log_softmax(1).gather(1, y[:, None]).mean()",
    "squares": "return (scores_of(x) - nn.functional.one_hot(y, 3).float()).pow(2).mean()",
    "sum": "return nn.functional.cross_entropy(scores_of(x), y, reduction='sum') / len(x)",
    "divided by hand": "return (scores_of(x) - nn.functional.one_hot(y, 3).float()).pow(2).sum() / y.shape[0]",
    "scripted": "return scripted(scores_of(x), y)",
    "compiled": "return compiled(scores_of(x), y)",
    "twice": """
        first, second = scores_of(x), scores_of(x)
        return nn.functional.cross_entropy(first, y) + 0.1 * (first - second).pow(2).mean()
    """,
    "decay": """
        decay = sum(parameter.pow(2).sum() for parameter in model.parameters() if parameter.requires_grad)
        return nn.functional.cross_entropy(scores_of(x), y) + 1e-4 * decay
    """,
    "mixed": """
        share, order = random.random(), torch.randperm(len(x))
        scores, loss = scores_of(share * x + (1 - share) * x[order]), nn.functional.cross_entropy
        return share * loss(scores, y) + (1 - share) * loss(scores, y[order])
    """,
    "views": """
        first, second = scores_of(torch.cat([x, x + 0.1 * torch.randn_like(x)])).chunk(2)
        return nn.functional.cross_entropy(first, y) + nn.functional.cross_entropy(second, y)
    """,
    "learned weight": """
        loss = nn.functional.cross_entropy(scores_of(x), y)
        return loss * (-log_variance).exp() + log_variance
    """,
    "list of samples": """
        scores = scores_of(x)
        return torch.stack([nn.functional.cross_entropy(scores[i : i + 1], y[i : i + 1]) for i in range(len(x))]).mean()
    """,
    "teacher": """
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        return nn.functional.kl_div(scores_of(x).log_softmax(1), wanted, reduction="batchmean")
    """,
    "penalty": """
        x = x.clone().requires_grad_()
        loss = nn.functional.cross_entropy(scores_of(x), y)
        [slope] = torch.autograd.grad(loss, x, create_graph=True)
        return loss + 0.1 * slope.pow(2).mean()
    """,
}
COMPILED_LOSSES = {
    "scripted": "scripted = torch.jit.script(smoothed)",
    "compiled": 'compiled = torch.compile(smoothed, fullgraph=True, backend="eager")',
}
LOADERS = {
    "shuffled": "loader = DataLoader(training, BATCH, shuffle=True, drop_last=True)",
    "ordered": "loader = DataLoader(training, BATCH, drop_last=True)",
    "uneven": "loader = DataLoader(training, BATCH, shuffle=True)",
    "generator": """
        own = torch.Generator().manual_seed(3)
        loader = DataLoader(training, BATCH, shuffle=True, drop_last=True, generator=own)
    """,
    "replacement": """
        with_replacement = RandomSampler(training, replacement=True, num_samples=SAMPLES)
        loader = DataLoader(training, BATCH, sampler=with_replacement, drop_last=True)
    """,
    "weights": """
        weighted = WeightedRandomSampler(torch.rand(len(training)) + 0.1, SAMPLES)
        loader = DataLoader(training, BATCH, sampler=weighted, drop_last=True)
    """,
    "batch sampler": "loader = DataLoader(training, batch_sampler=BatchSampler(RandomSampler(training), BATCH, True))",
    "distributed": """
        distributed = DistributedSampler(training, **RANKS)
        loader = DataLoader(training, BATCH, sampler=distributed, drop_last=True)
    """,
    "stream": """
        class Stream(IterableDataset):
            def __iter__(self):
                for _ in range(SAMPLES):
                    yield training[random.randrange(len(training))]

        loader = DataLoader(Stream(), BATCH, drop_last=True)
    """,
    "stream with a length": """
        class Stream(IterableDataset):
            def __iter__(self):
                return (training[place] for place in torch.randperm(SAMPLES).tolist())

            def __len__(self):
                return SAMPLES

        loader = DataLoader(Stream(), BATCH, drop_last=True)
    """,
    "collated": """
        def collate(samples):
            return torch.stack([x for x, _ in samples]), torch.tensor([int(y) for _, y in samples])

        loader = DataLoader(training, BATCH, shuffle=True, drop_last=True, collate_fn=collate)
    """,
    "batched already": """
        class Batches(Dataset):
            def __len__(self):
                return len(training) // BATCH

            def __getitem__(self, number):
                return training[number * BATCH : (number + 1) * BATCH]

        loader = DataLoader(Batches(), batch_size=None, shuffle=True)
    """,
    "subset": """
        part = torch.utils.data.Subset(training, torch.randperm(len(training)).tolist())
        loader = DataLoader(part, BATCH, shuffle=True, drop_last=True)
    """,
    "listed": """
        listed = [training[index] for index in range(len(training))]
        loader = DataLoader(listed, BATCH, shuffle=True, drop_last=True)
    """,
    "workers": "loader = DataLoader(training, BATCH, shuffle=True, drop_last=True, num_workers=1)",
}
DATASETS = {
    "pairs": "",
    "dict": """
        class Dicts(Dataset):
            def __len__(self):
                return SAMPLES

            def __getitem__(self, index):
                x, y = tensors[index]
                return {"x": x, "y": y, "id": index}

        tensors, training = training, Dicts()
    """,
    "numpy": """
        class Arrays(Dataset):
            def __len__(self):
                return SAMPLES

            def __getitem__(self, index):
                return arrays[0][index], arrays[1][index]

        arrays, training = [one.numpy() for one in training.tensors], Arrays()
    """,
}
OPTIMIZERS = {
    "SGD": "optimizer = torch.optim.SGD(trained, 0.1)",
    "momentum": "optimizer = torch.optim.SGD(trained, 0.1, momentum=0.9, nesterov=True)",
    "AdamW": "optimizer = torch.optim.AdamW(trained, 0.05)",
    "fused": "optimizer = torch.optim.Adam(trained, 0.05, fused=True)",
    "RMSprop": "optimizer = torch.optim.RMSprop(trained, 0.02)",
    "two groups": "optimizer = torch.optim.AdamW([dict(params=trained[:1], lr=0.01), dict(params=trained[1:])], 0.05)",
    "LBFGS": "optimizer = torch.optim.LBFGS(trained, 0.1, max_iter=3)",
}
SCHEDULES = {
    "": ("", "", ""),
    "one cycle": ("torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS)", "step", "STEPS"),
    "cosine of epochs": ("torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)", "epoch", "EPOCHS"),
    "cosine of steps": ("torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)", "step", "STEPS"),
    "halved": ("torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)", "epoch", ""),
    "milestones": ("torch.optim.lr_scheduler.MultiStepLR(optimizer, [EPOCHS // 2, EPOCHS - 1])", "epoch", ""),
    "warm-up": (
        "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 3, max(0.0, (STEPS - n) / STEPS)))",
        "step",
        "",
    ),
    "sequential": (
        "torch.optim.lr_scheduler.SequentialLR(optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, "
        "total_iters=2), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 2)], [2])",
        "step",
        "",
    ),
    "exponential": ("torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)", "step", ""),
    "polynomial": ("torch.optim.lr_scheduler.PolynomialLR(optimizer, STEPS)", "step", "STEPS"),
    "chained": (
        "torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), "
        "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)])",
        "epoch",
        "",
    ),
    "restarts": ("torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)", "epoch", ""),
    "cyclic": ("torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 3)", "step", ""),
    "by hand": ("", "hand", ""),
    "plateau": ("torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1000)", "validation", ""),
}
PRECISIONS = ("", "bfloat16", "scaler")
CLIPS = {
    "": "",
    "norm": "torch.nn.utils.clip_grad_norm_(trained, 1.0)",
    "value": "torch.nn.utils.clip_grad_value_(trained, 1.0)",
    "logged": "norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])))",
}
ZEROS = ("before the forward", "after the step", "model", "before the backward", "by hand")
VALIDATIONS = ("", "no_grad", "inference_mode", "decorated", "within an epoch")
SAVES = ("", "each epoch", "the model")
AVERAGES = {
    "": ("", ""),
    "AveragedModel": ("averaged = AveragedModel(model)", "averaged.update_parameters(model)"),
    "by hand": (
        "shadow = [p.detach().clone() for p in model.parameters()]",
        "with torch.no_grad():\n    for old, new in zip(shadow, model.parameters()):\n        old.lerp_(new, 0.1)",
    ),
    "a copy": (
        "shadow = copy.deepcopy(model).requires_grad_(False)",
        "for old, new in zip(shadow.parameters(), model.parameters()):\n    old.data.lerp_(new.data, 0.1)",
    ),
}
WALKS = ("epochs", "iterator", "cycle", "counted", "indices", "by length", "from one")
BATCHES = ("pairs", "dict", "numpy")
ASIDES = {
    "": ("", ""),
    "clamp": ("", "with torch.no_grad():\n    for parameter in trained:\n        parameter.clamp_(-5, 5)"),
    "scaled": ("", "for parameter in trained:\n    parameter.data.mul_(0.999)"),
    "noise": ("", "torch.rand(3).sum().item()"),
    "probe": ("", "with torch.no_grad():\n    seen.append(scores_of(x).argmax(1).eq(y).float().mean().item())"),
    "collected": ("", "gc.collect()"),
    "best": ("", "if loss.item() < best[0]:\n    best[0] = loss.item()"),
    "nan": ("", "if not torch.isfinite(loss):\n    raise SystemExit('the loss is no number')"),
    "numpy": ("", "np.random.rand()"),
    "means": ("", "norms.append(loss.item())\nif np.mean(norms) > 1e6:\n    raise SystemExit('it diverges')"),
    "critic": (
        "critic = nn.Linear(3, 1)\ncritic_optimizer = torch.optim.SGD(critic.parameters(), 0.01)",
        "critic_optimizer.zero_grad()\ncritic(scores_of(x).detach().float()).pow(2).mean().backward()\n"
        "critic_optimizer.step()",
    ),
    "adversary": (
        """generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
critic = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
first_optimizer = torch.optim.Adam(critic.parameters(), 0.01)
second_optimizer = torch.optim.Adam(generator.parameters(), 0.02)""",
        """judged, made = nn.functional.binary_cross_entropy_with_logits, generator(torch.randn(len(x), 4))
first_optimizer.zero_grad()
real, fake = critic(x), critic(made.detach())
(judged(real, torch.ones_like(real)) + judged(fake, torch.zeros_like(fake))).backward()
first_optimizer.step()
if number % 3 == 0:
    second_optimizer.zero_grad()
    judged(critic(made), torch.ones_like(fake)).backward()
    second_optimizer.step()""",
    ),
    "critics": (
        """generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
critic = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
first_optimizer = torch.optim.RMSprop(critic.parameters(), 0.01)
second_optimizer = torch.optim.RMSprop(generator.parameters(), 0.02)""",
        """for _ in range(2):
    critic.zero_grad()
    (critic(generator(torch.randn(len(x), 4)).detach()).mean() - critic(x).mean()).backward()
    first_optimizer.step()
    for parameter in critic.parameters():
        parameter.data.clamp_(-0.1, 0.1)
generator.zero_grad()
(-critic(generator(torch.randn(len(x), 4))).mean()).backward()
second_optimizer.step()""",
    ),
    "embedding": (
        "table = nn.Embedding(9, 2, sparse=True)\ntable_optimizer = torch.optim.SparseAdam(table.parameters(), 0.01)",
        "table_optimizer.zero_grad()\ntable(y).pow(2).mean().backward()\ntable_optimizer.step()",
    ),
}
SCORES = {
    "loss": "total += nn.functional.cross_entropy(scores_of(x), y).item()",
    "accuracy": "total += (scores_of(x).argmax(1) == y).sum().item()",
    "arrays": "total += float(np.mean(scores_of(x).float().argmax(1).numpy() == y.numpy()))",
    "tensors": "total += scores_of(x).float().softmax(1).amax(1).mean().tolist()",
}
ENDS = {
    "": "",
    "patience": """if score < best[0]:
    best[0], waited = score, 0
else:
    waited = 1 + locals().get("waited", 0)
    if waited > 100:
        break""",
    "new optimizer": "if epoch == 1:\n    optimizer = torch.optim.SGD(trained, 0.01)",
    "more parameters": """if epoch == 1:
    optimizer.add_param_group(dict(params=[nn.Parameter(torch.zeros(2))], lr=0.5))""",
    "lower rate": "if epoch == 1:\n    optimizer.param_groups[0]['lr'] *= 0.1",
    "print": "print(epoch, optimizer.param_groups[0]['lr'])",
    "freed": "gc.collect()",
}
"""Of an epoch."""
BEGINS = {"unfrozen later": "body.requires_grad_(epoch > 0)"}
HOOKS = {
    "": "",
    "forward": "model.register_forward_hook(lambda module, inputs, output: seen.append(1))",
    "backward": "model.register_full_backward_hook(lambda module, inputs, output: seen.append(1))",
    "parameter": "trained[0].register_hook(lambda gradient: seen.append(1))",
    "accumulated": "trained[0].register_post_accumulate_grad_hook(lambda parameter: seen.append(1))",
    "step": "optimizer.register_step_post_hook(lambda *_: seen.append(1))",
}
LOOPS = {
    "epochs": """
        for epoch in range(first_epoch, EPOCHS):
            $begins
            for number, ($batch) in enumerate($loader):
                $unpacked
                $body
            $ends
    """,
    "from one": """
        for epoch in range(1 + first_epoch, 1 + EPOCHS):
            epoch -= 1
            $begins
            for number, ($batch) in enumerate(loader, 1):
                number -= 1
                $unpacked
                $body
            $ends
    """,
    "by length": """
        for epoch in range(first_epoch, EPOCHS):
            $begins
            batches = iter(loader)
            for number in range(len(loader)):
                $batch = next(batches)
                $unpacked
                $body
            $ends
    """,
    "counted": """
        epoch = first_epoch
        while epoch < EPOCHS:
            $begins
            number = 0
            for $batch in loader:
                $unpacked
                $body
                number += 1
            $ends
            epoch += 1
    """,
    "indices": """
        epoch = 0
        $begins
        for number in range($total):
            places = torch.randint(0, len(training), (BATCH,))
            x, y = training.tensors[0][places], training.tensors[1][places]
            $body
    """,
    "cycle": """
        def endless():
            for epoch in itertools.count():
                $begins
                yield from loader

        for number, ($batch) in enumerate(itertools.islice(endless(), $total)):
            $unpacked
            $body
    """,
    "iterator": """
        epoch, batches = 0, iter(loader)
        $begins
        for number in range($total):
            try:
                $batch = next(batches)
            except StopIteration:
                epoch += 1
                $begins
                batches = iter(loader)
                $batch = next(batches)
            $unpacked
            $body
    """,
}
TOOLS = ("torch", "fabric")
FABRIC = """
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=1)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
"""
LAYOUTS = ("flat", "function", "class")
FAULTS = (
    "",
    "no zero_grad",
    "zeroed in each micro-batch",
    "loss not divided",
    "tail lost",
    "eval left on",
    "head replaced",
    "schedule of micro-batches",
    "stepped twice",
    "stepped by epoch",
    "stepped by step",
    "set_epoch never called",
    "validated on training",
    "seeded in each epoch",
    "dealt to each rank",
)
FOUND_BY = {
    "no zero_grad": "window",
    "zeroed in each micro-batch": "window",
    "loss not divided": "window",
    "tail lost": "window",
    "eval left on": "setup",
    "head replaced": "setup",
    "schedule of micro-batches": "horizon",
    "stepped twice": "horizon",
    "stepped by epoch": "horizon",
    "stepped by step": "horizon",
    "set_epoch never called": "order",
    "validated on training": "validation",
    "seeded in each epoch": "order",
    "dealt to each rank": "dealing",
}
