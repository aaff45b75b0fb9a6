"""Every operation has a cost: a formula for its FLOPs, or its bytes, or it is reported as unknown."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from fullshard import dry, fully_shard
from fullshard.dry.flops import flops_of, has_formula
from fullshard.dry.run import own_loss
from fullshard.plan.costs import Costs
from fullshard.plan.hardware import hardware
from fullshard.plan.operations import is_unknown, unknown_seconds
from fullshard.plan.prediction import predict
from fullshard.plan.timeline import lay_out
from fullshard.planner.candidates import Cluster
from fullshard.planner.question import Question
from fullshard.planner.report import as_dict, stated
from fullshard.planner.search import search
from fullshard.planner.subject import Subject
from fullshard.tape.tape import Operation

COMPUTES = re.compile(
    r"mm_?$|mm_act|conv|scaled_dot|flash_att|rnn|mv_?$|dot$|linear$|trilinear|_dist$|linalg_[^v]|_fft_"
)
"""Names of operations that do more than a few operations per byte, independently of the lists of the package."""

TINY: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "n_routed_experts", "n_heads"), 4),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 48),
    "vocab_size": 64,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_size": 32,
    "patch_size": 8,
}
ARCHITECTURES = {
    "CausalLM": (
        *("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "opt", "bloom", "olmo2", "mpt"),
        *("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "phimoe", "jamba", "falcon_mamba", "lfm2"),
    ),
    "MaskedLM": ("bert", "roberta", "albert", "distilbert", "deberta-v2", "fnet", "modernbert", "convbert"),
    "Seq2SeqLM": ("t5", "bart", "pegasus"),
    "ImageClassification": ("vit", "beit", "dinov2"),
}
MIXTURES = {"mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "phimoe"}
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    },
}


def operations_of(step: Callable[[], Tensor], **how: Any) -> list[Operation]:
    with dry.taped(**how) as tape:
        step().float().mean().backward()
    return list(tape.of(Operation))


def architecture(task: str, kind: str) -> list[Operation]:
    transformers = pytest.importorskip("transformers")

    def step() -> Tensor:
        config = transformers.AutoConfig.for_model(kind, **{**TINY, **OTHERS.get(kind, {})})
        model = getattr(transformers, f"AutoModelFor{task}").from_config(config).train()
        if task == "ImageClassification":
            return model(pixel_values=torch.ones(2, 3, 32, 32)).logits
        tokens = torch.randint(0, 64, (2, 16))
        return model(input_ids=tokens, labels=tokens).loss

    return operations_of(step)


def first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else first(result[0])


def layer(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Callable[[], Tensor]:
    return lambda: first(make()(*(torch.ones(shape, requires_grad=True) for shape in shapes)))


PIXELS, TOKENS = (2, 8, 16, 16), (2, 16, 8)
LAYERS: dict[str, Callable[[], Tensor]] = {
    **{
        f"{kind.__name__}{ndim}": layer(lambda kind=kind: kind(8, 8, 3), (2, 8, *(8,) * ndim))
        for kinds in (
            (nn.Conv1d, nn.Conv2d, nn.Conv3d),
            (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        )
        for ndim, kind in enumerate(kinds, 1)
    },
    **{kind.__name__: layer(lambda kind=kind: kind(8, 8, 2), TOKENS) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    **{kind.__name__: layer(lambda kind=kind: kind(8, 8), (2, 8)) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)},
    **{
        kind.__name__: layer(kind, PIXELS)
        for kind in (
            *(nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.Hardswish, nn.Softplus, nn.Hardtanh, nn.LogSigmoid, nn.PReLU),
            *(nn.Softmax2d, nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.RReLU, nn.LeakyReLU, nn.Hardshrink),
        )
    },
    **{kind.__name__: layer(lambda kind=kind: kind(8), PIXELS) for kind in (nn.BatchNorm2d, nn.InstanceNorm2d)},
    **{
        kind.__name__: layer(lambda kind=kind: kind(2), PIXELS)
        for kind in (
            *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.PixelShuffle, nn.ZeroPad2d),
            *(nn.UpsamplingNearest2d, nn.ReflectionPad2d, nn.ReplicationPad2d, nn.CircularPad2d, nn.LocalResponseNorm),
        )
    },
    "bilinear upsampling": layer(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), PIXELS),
    "Unfold": layer(lambda: nn.Unfold(3), PIXELS),
    "Fold": layer(lambda: nn.Fold((4, 4), 2), (2, 32, 9)),
    "GroupNorm": layer(lambda: nn.GroupNorm(2, 8), PIXELS),
    "LayerNorm": layer(lambda: nn.LayerNorm(8), TOKENS),
    "RMSNorm": layer(lambda: nn.RMSNorm(8), TOKENS),
    "Linear": layer(lambda: nn.Linear(8, 8), TOKENS),
    "Bilinear": layer(lambda: nn.Bilinear(8, 6, 5), (3, 8), (3, 6)),
    "MultiheadAttention": layer(lambda: nn.MultiheadAttention(8, 2), TOKENS, TOKENS, TOKENS),
    "TransformerEncoderLayer": layer(lambda: nn.TransformerEncoderLayer(8, 2, 16), TOKENS),
    "TransformerDecoderLayer": layer(lambda: nn.TransformerDecoderLayer(8, 2, 16), TOKENS, TOKENS),
    "CosineSimilarity": layer(nn.CosineSimilarity, TOKENS, TOKENS),
    "PairwiseDistance": layer(nn.PairwiseDistance, (2, 8), (2, 8)),
    **{
        kind.__name__: layer(kind, TOKENS, TOKENS)
        for kind in (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.BCEWithLogitsLoss)
    },
    "Embedding": lambda: nn.Embedding(8, 4)(torch.zeros(2, 3, dtype=torch.long)),
    "EmbeddingBag": lambda: nn.EmbeddingBag(8, 4)(torch.zeros(2, 3, dtype=torch.long)),
    "weight norm": layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), TOKENS),
    "distances": lambda: torch.cdist(torch.ones(32, 8, requires_grad=True), torch.ones(64, 8)),
    "vector": lambda: torch.mv(torch.ones(8, 8, requires_grad=True), torch.ones(8)),
    "in place": lambda: torch.ones(8, 8).addmm_(torch.ones(8, 8), torch.ones(8, 8)).requires_grad_(),
}
UNKNOWN: dict[str, Callable[[], Tensor]] = {
    "aten._fft_c2c": lambda: torch.fft.fft(torch.ones(4, 8, dtype=torch.complex64, requires_grad=True)).real,
    "aten.linalg_inv_ex": lambda: torch.linalg.inv(torch.ones(8, 8, requires_grad=True)),
    "aten._linalg_svd": lambda: torch.linalg.svdvals(torch.ones(8, 8, requires_grad=True)),
    "aten._cdist_forward": lambda: torch.cdist(torch.ones(8, 4, requires_grad=True), torch.ones(8, 4), p=1.0),
}


def without_cost(operations: list[Operation]) -> set[str]:
    """Return the names of compute operations that have no FLOPs and are not reported as unknown."""
    reported = unknown_seconds(lay_out(operations).placed)
    return {
        item.name for item in operations if COMPUTES.search(item.name) and not item.flops and item.name not in reported
    }


def unknown_in(operations: list[Operation]) -> set[str]:
    return set(unknown_seconds(lay_out(operations).placed))


@pytest.mark.parametrize(("task", "kind"), [(task, kind) for task, kinds in ARCHITECTURES.items() for kind in kinds])
def test_every_operation_of_an_architecture_has_a_cost(task, kind):
    operations = architecture(task, kind)
    assert without_cost(operations) == set()
    assert unknown_in(operations) == ({"aten._fft_c2c"} if kind == "fnet" else set())
    if kind in MIXTURES:
        assert any(item.name == "aten._grouped_mm" and item.flops for item in operations)


@pytest.mark.parametrize("streams", ["gpu", "cpu"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_operation_of_a_torch_layer_has_a_cost(name, streams):
    operations = operations_of(LAYERS[name], streams=streams)
    assert operations
    assert without_cost(operations) == set()
    assert unknown_in(operations) == set()


@pytest.mark.parametrize("name", UNKNOWN)
def test_operations_without_a_formula_are_unknown(name):
    assert name in unknown_in(operations_of(UNKNOWN[name]))


def test_operations_of_other_libraries_are_unknown():
    assert is_unknown("a_library.an_operation") and not is_unknown("fullshard.an_operation")


# ------------------------------------------------------------------------------------------------------- the formulas


def flops_by(step: Callable[[], Tensor], **how: Any) -> int:
    return sum(item.flops for item in operations_of(step, **how))


def test_grouped_mm_flops_count_each_row_once():
    """The FLOPs equal those of a product of all rows with one matrix, in forward and in backward."""

    def step() -> Tensor:
        weight = torch.ones(4, 16, 24, dtype=torch.bfloat16, requires_grad=True)
        rows = torch.ones(40, 16, dtype=torch.bfloat16, requires_grad=True)
        return F.grouped_mm(rows, weight, offs=torch.tensor([8, 16, 24, 40], dtype=torch.int32))

    assert flops_by(step) == 3 * 2 * 40 * 16 * 24
    whole = torch.ones(4, 10, 16), torch.ones(4, 16, 24)
    grouped = torch.ops.aten._grouped_mm.default
    assert flops_of(grouped, whole, {}, None) == flops_of(torch.ops.aten.bmm.default, whole, {}, torch.bmm(*whole))


@pytest.mark.parametrize("streams", ["gpu", "cpu"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("how", [{"num_layers": 2}, {"bidirectional": True, "batch_first": True, "bias": False}])
def test_recurrent_layer_flops_match_their_weight_matrices(kind, how, streams):
    numel = sum(param.numel() for param in kind(8, 16, **how).parameters() if param.ndim == 2)
    flops = flops_by(layer(lambda: kind(8, 16, **how), (5, 3, 8)), streams=streams)
    assert flops == pytest.approx(3 * 2 * 15 * numel, rel=0 if streams == "gpu" or kind is nn.LSTM else 0.4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "how", [{"num_layers": 2, "dropout": 0.1}, {"bidirectional": True, "batch_first": True}, {"proj_size": 4}]
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_recurrent_layer_on_gpu_is_one_operation_with_torch_shapes(kind, how):
    if "proj_size" in how and kind is not nn.LSTM:
        return
    shapes = []

    def step() -> Tensor:
        model, x = kind(8, 16, **how), torch.ones(5, 3, 8, requires_grad=True)
        output, state = model(x)
        loss = output.sum() + sum(item.sum() for item in (state if isinstance(state, tuple) else (state,)))
        loss.backward(retain_graph=True)
        shapes.append(
            [output.shape, first(state).shape, x.grad.shape, *(item.grad.shape for item in model.parameters())]
        )
        return loss

    names = [item.name for item in operations_of(step) if "rnn" in item.name]
    assert names == ["aten._cudnn_rnn", *["aten._cudnn_rnn_backward"] * 2]
    step()
    assert shapes[0] == shapes[1]


def test_dry_run_supports_packed_sequences():
    def step() -> Tensor:
        x = torch.ones(15, 8, requires_grad=True)
        packed = nn.utils.rnn.PackedSequence(x, torch.ones(5, dtype=torch.long))
        return nn.LSTM(8, 16)(packed)[0].data

    flops = sum(item.flops for item in operations_of(step))
    assert flops == 3 * 2 * 15 * 4 * 16 * (8 + 16)


def test_cpu_lstm_includes_the_onednn_workspace():
    """The workspace of real tensors is larger for small layers, whose steps are padded."""
    args = torch.ones(128, 8, 64), torch.ones(1024, 64), torch.ones(1024, 256), torch.ones(1024), torch.ones(1024)
    state = torch.ones(8, 256), torch.ones(8, 256), False, [], 2, 256, 1, True, False, False, True

    def workspace() -> int:
        return torch.ops.aten.mkldnn_rnn_layer(*args, *state)[3].nbytes

    with dry.taped(streams="cpu"):
        args, state = ((*map(torch.empty_like, each[:n]), *each[n:]) for each, n in ((args, 5), (state, 2)))
        found = workspace()
    args, state = ((*(torch.ones(item.shape) for item in each[:n]), *each[n:]) for each, n in ((args, 5), (state, 2)))
    assert found == pytest.approx(workspace(), rel=0.05)


def test_bilinear_layers_and_distances_have_matmul_flops():
    assert flops_by(layer(lambda: nn.Bilinear(8, 6, 5), (3, 8), (3, 6))) >= 3 * 2 * 3 * 8 * 6 * 5
    distances = torch.ones(32, 8), torch.ones(64, 8)
    assert flops_of(torch.ops.aten._euclidean_dist.default, distances, {}, None) == 2 * 32 * 64 * (8 + 2)


def test_compute_bound_operations_have_a_formula():
    for name in ("mm", "addmm_", "_grouped_mm", "mv", "dot", "_cudnn_rnn", "convolution", "_trilinear"):
        assert has_formula(getattr(torch.ops.aten, name)), name


# --------------------------------------------------------------------------------------------- what the planner shows


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(self.mix(x).float()).real


def test_plan_lists_unknown_operations_with_their_shares():
    with torch.device("meta"):
        model = Spectral()
    subject = Subject(name="fft", model=model, make_batch=lambda rows: torch.ones(rows, 64, 64), loss=own_loss)
    cluster = Cluster(hardware=hardware("h100-80"), hosts=1, per_host=8)
    asked = Question(subject=subject, cluster=cluster, global_batch=8, strategies=("ddp",), checkpointing=("none",))
    plan = search(asked)
    (line,) = (line for line in stated(plan) if "formula" in line)
    share = plan.best.figures.unknown["aten._fft_c2c"]
    assert 0 < share < 1
    assert f"aten._fft_c2c ({share:.1%} of the step)" in line
    assert as_dict(plan)["recommended"]["unknown"]["aten._fft_c2c"] == share


def test_prediction_contains_the_seconds_of_unknown_operations():
    found = predict(
        lambda: fully_shard(Spectral()), lambda: torch.ones(2, 64, 64), hardware=hardware("h100-80"), world=8
    )
    expected = Costs().launch_s
    assert found.unknown["aten._fft_c2c"] > expected
    assert found.unknown["aten._fft_c2c"] < found.step_s


@pytest.mark.parametrize("name", ["addmm_", "addmv_", "addbmm_", "baddbmm_"])
def test_in_place_matmuls_have_a_formula(name: str) -> None:
    assert has_formula(getattr(torch.ops.aten, name))


def test_formula_registered_later_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    packet = torch.ops.aten._linalg_svd
    assert is_unknown("aten._linalg_svd")
    monkeypatch.setitem(flop_registry, packet, lambda *args, **kwargs: 7)
    assert has_formula(packet)
    assert not is_unknown("aten._linalg_svd")
