"""The model, its loss, generate() and the training shortcuts on a device, compared with the CPU in float32."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import is_flash_attn_2_available

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, engine
from hf_vanilla_transformer.data.packing import PackingCollator
from hf_vanilla_transformer.engine.decoding.graph import Graph
from hf_vanilla_transformer.engine.decoding.packed import Packed
from hf_vanilla_transformer.engine.training import shortcuts
from hf_vanilla_transformer.plan_vanilla_transformer import Plan
from hf_vanilla_transformer.plots.curves import plot_attention

V = 40
# float32 products in another order, through four layers; wrong attention changes logits of magnitude 1 by as much.
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}
BFLOAT16 = 0.05  # relative error of all logits or gradients together: bfloat16 keeps 8 bits, and two layers add some
FLASH2 = pytest.mark.skipif(not is_flash_attn_2_available(), reason="needs the package flash-attn and CUDA")
ATTENTIONS = ["eager", "sdpa", "sdpa, flash", pytest.param("flash_attention_2", marks=FLASH2)]


def model_of(**fields):
    """A model in evaluation mode on the CPU; its translations depend on the source and end at different times."""
    torch.manual_seed(3)
    config = VanillaTransformerConfig(
        vocab_size=V, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, dropout=0.0, output_bias=True,
        tie_word_embeddings=False, **fields,
    )  # fmt: skip
    model = VanillaTransformerForConditionalGeneration(config).eval()
    model.lm_head.weight.data *= 2
    model.lm_head.weight.data[config.eos_token_id] = 0.0
    model.lm_head.bias.data[config.eos_token_id] = 3.6  # near the largest logits
    return model


def batch_of(device="cpu", is_padded=True):
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(3, V, (5, length), generator=generator) for length in (9, 8))
    mask = torch.ones_like(ids)
    if is_padded:
        for row in range(4):
            mask[row, 9 - row :], labels[row, 8 - row :] = 0, -100
    batch = {"input_ids": ids.where(mask == 1, 0), "attention_mask": mask, "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def gradients(model, batch, **options):
    """Loss and all gradients, as one vector, on the CPU in float32."""
    model.zero_grad()
    loss = model(**batch, **options).loss
    loss.backward()
    return loss.detach().float().cpu(), torch.cat([p.grad.float().cpu().flatten() for p in model.parameters()])


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def test_forward_and_backward_in_float32_are_the_cpus(device):
    model, batch = model_of().train(), batch_of()
    expected = gradients(model, batch)
    logits = model(**batch).logits
    model, batch = model.to(device), batch_of(device)
    torch.testing.assert_close(gradients(model, batch), expected, **ROUNDING)
    torch.testing.assert_close(model(**batch).logits.cpu(), logits, **ROUNDING)
    for options in ({"skip_logits": True}, {"num_items_in_batch": 30}):
        on_cpu = gradients(copy.deepcopy(model).cpu(), batch_of(), **options)
        torch.testing.assert_close(gradients(model, batch, **options), on_cpu, **ROUNDING)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_bfloat16_autocast_is_near_float32(device, attention):
    if attention == "flash_attention_2" and device.type == "cpu":
        pytest.skip("flash-attn has no kernels for CPUs")
    batch = batch_of(is_padded=False)  # flash kernels take no mask
    model = model_of(attn_implementation="eager").train()
    expected_loss, expected = gradients(model, batch)
    expected_logits = model(**batch).logits.detach()
    model.set_attn_implementation(attention.split(",")[0])
    model, batch = model.to(device), batch_of(device, is_padded=False)
    only_flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if attention == "sdpa, flash" else nullcontext()
    with torch.autocast(device.type, torch.bfloat16), only_flash:
        loss, found = gradients(model, batch)
        logits = model(**batch).logits
    assert logits.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(expected_loss.item(), rel=BFLOAT16)
    assert relative_error(logits.float().cpu(), expected_logits) < BFLOAT16
    assert relative_error(found, expected) < BFLOAT16


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_generate_returns_the_cpus_tokens(device, attention, num_beams):
    model, inputs = model_of(attn_implementation=attention), batch_of()
    inputs.pop("labels")
    options = {"num_beams": num_beams, "min_new_tokens": 4, "max_new_tokens": 12, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **options, output_scores=True)
    lengths = {len(row[row != model.config.pad_token_id]) for row in expected.sequences}
    assert num_beams > 1 or len(lengths) > 1, "no translation ends before another"
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    found = model.to(device).generate(**inputs, **options, output_scores=True)
    assert found.sequences.device.type == device.type
    assert found.sequences.tolist() == expected.sequences.tolist()
    if num_beams > 1:
        torch.testing.assert_close(found.sequences_scores.cpu(), expected.sequences_scores, **ROUNDING)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_the_engine_finds_the_same_on_every_device(device, num_beams):
    model, inputs = model_of(), batch_of()
    inputs.pop("labels")
    options = {"num_beams": num_beams, "min_new_tokens": 4, "max_new_tokens": 12, "return_dict_in_generate": True}
    options |= {"output_alignments": True} | ({"coverage_penalty": 0.5} if num_beams > 1 else {})
    with engine.attach(model):
        expected = model.generate(**inputs, **options)
    model, inputs = model.to(device), {name: tensor.to(device) for name, tensor in inputs.items()}
    with engine.attach(model) as attached:
        found = model.generate(**inputs, **options)
    assert (attached.calls, attached.fallbacks) == (1, 0)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(found.alignments.cpu(), expected.alignments, **ROUNDING)
    is_refused = pytest.raises(engine.EngineError, match=r"int8 needs a model in float32 on a CPU, .* float32 on cuda")
    with nullcontext() if device.type == "cpu" else is_refused:
        assert engine.attach(model, "int8").compute_type == "int8"


@torch.no_grad()
def hypotheses(prepared, plan, device):
    """What 20 sources are translated to, of several lengths."""
    ids = torch.randint(3, V, (20, 9), generator=torch.Generator().manual_seed(2)).to(device)
    mask = (torch.arange(9) < torch.arange(20)[:, None] % 7 + 3).long().to(device)
    prompts = torch.full((20, 1), plan.start, device=device)
    return prepared.search(plan, prepared.encode(ids, mask), mask, prompts, [plan.limit[1]] * 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_captured_steps_find_what_the_cpu_does_and_are_captured_once(device, num_beams, dtype):
    """In bfloat16 a near tie may be decided otherwise, and then what follows is another translation."""
    model = model_of()
    config, limit = model.config, ("max_new_tokens", 12)
    plan = Plan(
        num_beams, limit=limit, min_new_tokens=4, start=config.decoder_start_token_id, ends=(config.eos_token_id,)
    )
    expected, graph = hypotheses(Packed(model), plan, "cpu"), Graph(copy.deepcopy(model).to(device, dtype))
    assert len({len(own[0].tokens) for own in expected}) > 2
    same = differ = 0
    for _ in range(2):
        found = hypotheses(graph, plan, device)
        for ours, theirs in zip(found, expected, strict=True):
            if dtype == torch.float32:
                assert ours[0].tokens == theirs[0].tokens
                assert num_beams == 1 or ours[0].score == pytest.approx(theirs[0].score, rel=1e-4)
            pairs = [one == other for one, other in zip(ours[0].tokens, theirs[0].tokens, strict=False)]
            same += ([*pairs, False]).index(False)
            differ += not all(pairs)
    assert same / (same + differ) >= 0.95
    assert [len(one.graphs) for one in graph._steps.values()] == [int(device.type == "cuda")]


def test_training_shortcuts_change_no_loss_and_are_for_cpus(device, monkeypatch):
    model, parted, compute = model_of().train().to(device), [], shortcuts.projected_cross_entropy
    monkeypatch.setattr(shortcuts, "projected_cross_entropy", lambda *args: parted.append(1) or compute(*args))
    batch = batch_of(device)
    expected = gradients(model, batch)
    with engine.training_shortcuts(model):
        torch.testing.assert_close(gradients(model, batch, skip_logits=True), expected, **ROUNDING)
    assert bool(parted) == (device.type == "cpu")
    torch.testing.assert_close(gradients(model, batch), expected, **ROUNDING)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["plain", "compiled"])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_packed_batches_are_the_cpus_padded_ones(device, compiled, bf16):
    """On CUDA by FlexAttention: rows of several blocks, most of which have no pair in common."""
    lengths = [(1 + 7 * n % 23, 1 + 5 * n % 19) for n in range(80)]
    ids = [[(3 + i + n) % (V - 3) + 3 for i in range(length)] for n, pair in enumerate(lengths) for length in pair]
    pairs = [{"input_ids": source, "labels": target} for source, target in zip(ids[::2], ids[1::2], strict=True)]
    model, width = model_of().train(), max(map(len, ids))
    source = torch.tensor([pair["input_ids"] + [0] * (width - len(pair["input_ids"])) for pair in pairs])
    labels = torch.tensor([pair["labels"] + [-100] * (width - len(pair["labels"])) for pair in pairs])
    padded = {"input_ids": source, "attention_mask": (source > 0).long(), "labels": labels}
    expected_loss, expected = gradients(model, padded, skip_logits=True)
    packed = {name: x.to(device) for name, x in PackingCollator(model.config, (3, 512, 448))(pairs).items()}
    model, backend = model.to(device), {"backend": "aot_eager" if device.type == "cpu" else "inductor"}
    with (
        engine.training_shortcuts(model, backend if compiled else None),
        torch.autocast(device.type, torch.bfloat16, enabled=bf16),
    ):
        loss, found = gradients(model, packed, skip_logits=True)
        assert model.model.forward.uses_blocks, "it fell back to dense masks"
    assert loss.item() == pytest.approx(expected_loss.item(), rel=BFLOAT16 if bf16 else 1e-4)
    assert relative_error(found, expected) < (BFLOAT16 if bf16 else 1e-4)


def test_attention_weights_on_a_device_are_plotted(device):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    model, batch = model_of().to(device), batch_of(device, is_padded=False)
    weights = model(**batch, output_attentions=True).cross_attentions[0][0]
    assert plot_attention(weights, ["s"] * 9, ["t"] * 8).axes
