"""Random programs. A missing key means the default, so that shrinking deletes keys."""

from __future__ import annotations

import json
import random
from typing import Any

from benchmarks.fuzzing.execution import BOXES, META

Json = dict[str, Any]

FEATURES = ("hidden", "aux")
"""Parts that `--without` leaves out."""
HIDDEN = ("list subclass", "object", "closure")

LEAVES = {
    "linear": 4,
    "mlp": 4,
    "norm": 2,
    "batch norm": 1,
    "scale": 1,
    "lookup": 1,
    "weight norm": 0.5,
    "attention": 0.7,
    "encoder": 0.5,
    "recurrent": 0.5,
    "convolution": 0.7,
    "complex": 0.7,
    "integers": 0.5,
    "unused": 1,
    "counted": 1,
    "shape": 2,
    "tied": 2,
    "again": 1,
}
INNER = {
    "sequence": 4,
    "own": 1,
    "residual": 2,
    "parallel": 1,
    "repeat": 1,
    "dropped": 0.5,
    "detached": 0.5,
    "double": 0.5,
    "box": 1,
    "aux": 0.3,
}
FRESH = ("linear", "tied", "mlp", "lookup", "counted", "residual", "own")
"""Modules whose output no other module reads, and no backward needs."""
PASSES_FRESH = ("sequence", "residual", "dropped", "detached", "box", "aux")
"""Modules that read their input only before or without a gradient of their children's input."""
OPTIMIZERS: list[Json] = [
    {"name": "SGD"},
    {"name": "SGD", "momentum": 0.9, "nesterov": True},
    {"name": "SGD", "momentum": 0.9, "foreach": True, "weight_decay": 0.1},
    {"name": "AdamW", "lr": 0.01},
    {"name": "AdamW", "lr": 0.01, "foreach": True},
    {"name": "AdamW", "lr": 0.01, "fused": True},
    {"name": "Adam", "lr": 0.01, "amsgrad": True},
    {"name": "Adagrad", "lr": 0.02},
    {"name": "RMSprop", "lr": 0.005, "momentum": 0.5},
    {"name": "NAdam", "lr": 0.005},
    {"name": "RAdam", "lr": 0.005},
    {"name": "Adamax", "lr": 0.005},
    {"name": "Adadelta"},
    {"name": "ASGD"},
    {"name": "Rprop", "lr": 0.005},
]
OFFLOADS: list[Json] = [  # `share` is that of a budget, see `with_budget`
    {"cpu": True},
    {"optimizer": {"cpu": 1.0}},
    {"optimizer": {"disk": 0.5}},
    {"optimizer": {"cpu": 0.5, "disk": 0.5}},
    {"parameters": {"disk": 0.5}},
    {"parameters": {"disk": 1.0}},
    {"activations": {"disk": 1.0}},
    {"activations": {"cpu": 0.5, "disk": 0.5}},
    {"budget": "1MB"},
    {"share": 0.0},
    {"share": 0.4},
    {"share": 0.8},
]


class Generator:
    """One random program of a seed."""

    def __init__(
        self, seed: str, ranks: tuple[int, ...] = (1, 2, 3, 4), without: tuple[str, ...] = (), device: str = "cpu"
    ) -> None:
        self.random = random.Random(seed)
        self._ranks = ranks
        self._without = without
        self._device = device
        self._labels: list[str] = []
        self._size = 0

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def weighted(self, weights: dict[str, float]) -> str:
        return self.random.choices(list(weights), list(weights.values()))[0]

    def program(self) -> Json:
        choose = self.random.choice
        self.with_precision = self.chance(0.25)
        ranks = choose(self._ranks)
        program: Json = {"ranks": ranks, "width": choose((5, 6, 16, 48)), "seed": self.random.randrange(1000)}
        self._limit = choose((4, 8, 14))
        nodes = self.chain(0, self.random.randint(1, 4), fresh=True)
        nodes.insert(self.random.randint(0, len(nodes)), {"kind": "linear"})  # something is trained
        program["model"] = {"kind": "sequence", "children": nodes}
        program["strategy"] = choose(("ddp", "zero1", "zero2", "zero3", "zero3", "hsdp", "hsdp_zero2"))
        if program["strategy"].startswith("hsdp"):
            program["replicas"] = choose([item for item in (1, 2, 3, 4) if ranks % item == 0])
        if ranks == 4 and self.chance(0.15):
            program |= {"strategy": choose(("hpz", "hfsdp"))}
            program.pop("replicas", None)
        if self.with_precision:
            program["precision"] = self.precision()
        elif self.chance(0.08):
            program["dtype"] = choose(("bfloat16", "float64"))
        self.interface(program)
        optimizers = OPTIMIZERS
        if (ranks > 1 and program["strategy"] != "ddp") or '"complex"' in json.dumps(
            program["model"]
        ):  # a fused kernel of torch rounds the last elements differently
            optimizers = [optimizer for optimizer in OPTIMIZERS if "fused" not in optimizer]
        program["optimizer"] = choose(optimizers) | ({"two groups": True} if self.chance(0.2) else {})
        for key, probability in (("input needs grad", 0.1), ("broadcast_buffers", 0.1), ("check finite", 0.1)):
            if self.chance(probability):
                program[key] = True
        if self.chance(0.2):
            program["share units"] = self.chance(0.3)
        if self.chance(0.15):
            program["no shared memory"] = True
        self.extras(program)
        if any(key in program for key in ("precision", "dtype", "autocast")):  # oneDNN has no LSTM in half precision
            program["model"] = json.loads(json.dumps(program["model"]).replace('"LSTM"', '"GRU"'))
        program["loop"] = self.loop(program)
        if self._device == "cpu":
            # Collectives of the backend, which streams need, are not compared between ranks, and sum in another order.
            if "by rank" not in json.dumps(program) and ranks < 3 and self.chance(0.15):
                program["simulated streams"] = True
        else:
            program["device"] = self._device
            if self.chance(0.5):
                program["late streams"] = self.random.randrange(100)
        return one_call(program) if "reentrant" in str(program) else program

    def interface(self, program: Json) -> None:
        if self.chance(0.3) and "output_dtype" not in program.get("precision", {}):
            program["interface"] = "wrapper"
            if self.with_precision and "batch norm" in str(program["model"]):
                program.pop("precision")
            program.get("precision", {}).pop("cast_forward_inputs", None)
            for key in ("forward prefetch", "limit"):
                if self.chance(0.2):
                    program[key] = key != "limit"
            return
        if self.chance(0.2):
            program["offload"] = self.random.choice(OFFLOADS)
        if self.chance(0.08):
            program["shard dim 1"] = True

    def extras(self, program: Json) -> None:
        """Add hooks of the user, a penalty, autocast, or another way to start."""
        choose, model = self.random.choice, json.dumps(program["model"])
        if self.chance(0.15):
            kinds = ["accumulated"]
            if not self.with_precision:  # hooks of users and casts of units have an order
                kinds += ["forward pre", "forward"]
            if "recompute" not in model and "inplace" not in model:  # the views of backward hooks must not be written
                kinds += ["backward", "backward pre"]
            program["hooks"] = [
                {"on": choose(kinds), "module": self.random.randrange(20)} for _ in range(self.random.randint(1, 3))
            ]
        has_second = not any(f'"{kind}"' in model for kind in ("attention", "encoder", "recompute"))
        if has_second and self.chance(0.08):
            program |= {"penalty": True, "input needs grad": True}
        if not self.with_precision and "dtype" not in program and self.chance(0.05):
            program["autocast"] = choose(("bfloat16", "float16"))
        if self.chance(0.1):
            program["start"] = choose(META)
        elif program.get("interface") == "wrapper" and self.chance(0.2):
            program["start"] = "synchronized"

    def precision(self) -> Json:
        choose = self.random.choice
        made: Json = {"param_dtype": choose(("bfloat16", "bfloat16", "float16"))}
        if self.chance(0.6):
            made["reduce_dtype"] = choose(("float32", "bfloat16", "float64"))
        if self.chance(0.2):
            made["output_dtype"] = choose(("float32", "bfloat16"))
        if self.chance(0.1):
            del made["param_dtype"]
            made["reduce_dtype"] = "bfloat16"
        return made

    def chain(self, depth: int, count: int, fresh: bool) -> list[Json]:
        """Return nodes that are called one after the other. `fresh` is as in `node`, for the first of them."""
        nodes: list[Json] = []
        for _ in range(count):
            nodes.append(self.node(depth, fresh))
            fresh = nodes[-1]["kind"] in FRESH and "recompute" not in nodes[-1]
        return nodes

    def node(self, depth: int, fresh: bool) -> Json:
        """Return a random module. Only a `fresh` input, which nothing else reads, may be written in place."""
        self._size += 1
        is_leaf = depth >= 4 or self._size >= self._limit or self.chance(0.45)
        kind = self.weighted(LEAVES if is_leaf else INNER)
        if kind in ("tied", "again") and not self._labels:
            kind = "linear"
        if kind in ("aux",) and "aux" in self._without:
            kind = "residual"
        if kind == "batch norm" and self.with_precision:
            kind = "norm"  # no kernel takes parameters in half precision and averages in float32
        node: Json = {"kind": kind}
        choose = self.random.choice
        self.flags(node)
        if not is_leaf:
            fresh = fresh and kind in PASSES_FRESH and "recompute" not in node
            if kind == "parallel":
                node["children"] = [self.node(depth + 1, False) for _ in range(self.random.randint(1, 3))]
            else:
                node["children"] = self.chain(depth + 1, self.random.randint(1, 3) if kind == "sequence" else 1, fresh)
        if kind == "linear":
            node |= {"label": str(self._size)} | ({} if self.chance(0.7) else {"bias": False})
            self._labels.append(node["label"])
        elif kind in ("tied", "again"):
            node["to"] = choose(self._labels)
        elif kind == "mlp":
            node["hidden"] = choose((1, 3, 7, 16, 192))
        elif kind in ("lookup", "unused"):
            node["rows"] = choose((1, 3, 9))
        elif kind == "shape":
            node["how"] = choose(
                ("inplace", "inplace on input", "inplace on input", "strides", "view", "same", "dropout")
            )
            if node["how"] == "inplace on input" and (not fresh or "recompute" in node):
                node["how"] = "inplace"
        elif kind == "recurrent":
            node["how"] = choose(("GRU", "LSTM", "RNN"))
        elif kind == "convolution":
            node["channels"] = choose((1, 3, 4))
        elif kind == "repeat":
            node["times"] = choose((2, 3))
        elif kind == "dropped":
            node |= {"every": choose((2, 3))} | ({"by rank": True} if self.chance(0.3) else {})
        elif kind == "detached" and self.chance(0.5):
            node["no_grad"] = True
        elif kind == "parallel" and self.chance(0.5):
            node["reverse"] = True
        elif kind == "box":
            node["how"] = choose([box for box in BOXES if "hidden" not in self._without or box not in HIDDEN])
            if self.chance(0.3):
                node["since"] = 3
        return node

    def flags(self, node: Json) -> None:
        if self.chance(0.15 if node["kind"] in LEAVES else 0.5):
            node["unit"] = {}
            if self.chance(0.2):
                node["unit"] = {"reshard_after_forward": self.chance(0.5)}
            if self.chance(0.3):
                node["as one"] = True
        if self.chance(0.08):
            node["frozen"] = True
        if self.chance(0.03):
            node["ignored"] = True
        if self.chance(0.12) and node["kind"] not in ("box", "aux"):
            node["recompute"] = self.random.choice(("no", "no", "reentrant", "wrapper"))
            if self.chance(0.4):
                node["unit outside"] = True

    def loop(self, program: Json) -> list[Json]:
        others = {
            "evaluate": 2,
            "forward_only": 1,
            "boom": 1,
            "edit": 1.5,
            "summon": 1,
            "learning_rate": 1,
            "freeze": 0.7,
            "copied": 0.5,
            "unshard": 1,
            "state_dicts": 1,
            "optimizer_state": 0.7,
            "reload": 0.7,
            "checkpointed": 1,
            "saved": 0.7,
            "groups": 1,
        }
        no_tangents = ("recurrent", "attention", "encoder", "recompute", "convolution", "precision", "autocast")
        if not any(item in json.dumps(program) for item in (*no_tangents, "broadcast_buffers")):
            others["tangent"] = 1
        if any(hook["on"] == "accumulated" for hook in program.get("hooks", [])):  # a copied parameter has no hooks
            others.pop("copied")
        loop = [self.step(program)]
        for _ in range(self.random.randint(1, 6)):
            loop.append(self.step(program) if self.chance(0.6) else self.other(self.weighted(others), program))
        if "by rank" in str(program["model"]):  # an error on one rank alone leaves the others waiting
            loop = [action for action in loop if action["do"] != "boom"]
        if any("into" in action for action in loop):  # the new optimizer has the groups of the first one
            loop = [action for action in loop if action["do"] != "groups"]
        return loop

    def step(self, program: Json) -> Json:
        action: Json = {"do": "step"}
        choose = self.random.choice
        if program["strategy"] != "hfsdp" and self.chance(0.35):
            action["micro"] = choose((2, 3))
            if self.chance(0.4):
                action["sync"] = "each"
            if self.chance(0.2):
                action["zero between"] = choose(("model", "optimizer"))
        for key, probability in (
            ("two forwards", 0.1),
            ("twice", 0.07),
            ("no_sync", 0.3),
            ("keep grads", 0.05),
            ("zero model", 0.2),
            ("closure", 0.06),
            ("step hook", 0.06),
        ):
            if self.chance(probability):
                action[key] = True
        if self.chance(0.15):
            action["set_to_none"] = False
        if self.chance(0.2):
            action["edit grads"] = choose(("scale", "replace", "drop", "zero", "clamp"))
        if self.chance(0.35) and not program.get("shard dim 1"):
            action["clip"] = choose((0.1, 1.0, 100.0))
        return action

    def other(self, do: str, program: Json) -> Json:
        action: Json = {"do": do}
        choose = self.random.choice
        if do == "boom":
            action |= {"where": choose(("forward", "backward")), "module": self.random.randrange(20)}
        elif do in ("unshard", "freeze"):
            action["which"] = self.random.randrange(20)
        if do == "freeze" and self.chance(0.5):
            action["trained"] = True
        if do == "edit" and self.chance(0.6):
            action["how"] = choose(("foreach", "data"))
        if do == "groups":
            action |= {"how": choose(("options", "move", "reverse")), "which": self.random.randrange(20)}
        if do == "boom" and self.chance(0.4):
            action["after"] = choose((1, 2))
        if do == "checkpointed" and self.chance(0.5) and "replicas" not in program:
            action["into"] = choose(("ddp", "zero1", "zero2", "zero3"))
        flags = {"unshard": ("async", "no wait", "leave"), "summon": ("write",), "evaluate": ("inference",)}
        flags |= {"copied": ("together",), "checkpointed": ("async",), "reload": ("full",), "saved": ("mmap",)}
        for flag in flags.get(do, ()):
            if self.chance(0.4):
                action[flag] = True
        return action


def one_call(program: Json) -> Json:
    """Return the program with reentrant checkpoints replaced where a parameter has several gradients in one backward.

    Each nested backward of a reentrant checkpoint is a separate reduction, which changes the order of sums.
    """
    several = ("repeat", "again", "tied", "own", "two forwards")
    text = json.dumps(program)
    return json.loads(text.replace('"reentrant"', '"no"')) if any(f'"{item}"' in text for item in several) else program
