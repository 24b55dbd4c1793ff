"""Adapters of PEFT: prefix and prompt tuning, LoRA, IA3, on the model and on its output projection."""

import pytest
import torch
from contract import assert_served, check, generated, has_engine, naive, new_model, plain_step
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model

from hf_vanilla_transformer import engine

SEQ2SEQ = TaskType.SEQ_2_SEQ_LM


def randomised(model, scale=1.0):
    """Adapters begin as the identity: these don't."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "prompt_" in name:
                parameter.copy_(scale * torch.randn_like(parameter))
            elif "ia3_" in name:
                parameter.copy_(1 + scale * torch.randn_like(parameter))
    return model.eval()


def with_adapter(config, scale=1.0):
    return lambda model, changes: randomised(get_peft_model(model, config), scale)


ADAPTERS = {
    "LoRA": LoraConfig(task_type=SEQ2SEQ, r=4, target_modules=["q_proj", "v_proj"]),
    "LoRA on lm_head": LoraConfig(task_type=SEQ2SEQ, r=4, target_modules=["lm_head"]),
    "LoRA in the encoder": LoraConfig(
        task_type=SEQ2SEQ, r=4, target_modules=r".*encoder\.layers.*\.fc1", target_parameters=None
    ),
    "LoRA on embeddings": LoraConfig(task_type=SEQ2SEQ, r=4, target_modules=["embed_tokens"]),
    "DoRA": LoraConfig(task_type=SEQ2SEQ, r=4, target_modules=["fc1"], use_dora=True),
    "IA3": IA3Config(task_type=SEQ2SEQ, target_modules=["k_proj", "v_proj", "fc2"], feedforward_modules=["fc2"]),
    "IA3 on lm_head": IA3Config(task_type=SEQ2SEQ, target_modules=["lm_head"], feedforward_modules=[]),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter(name):
    check(new_model(), with_adapter(ADAPTERS[name]))


@pytest.mark.parametrize("name", ["LoRA", "LoRA on lm_head", "IA3"])
def test_an_adapter_of_the_inner_model(name):
    """PEFT changes the model that it is given: who generates with that one has the adapter too."""

    def change(model, changes):
        with_adapter(ADAPTERS[name])(model, changes)

    check(new_model(), change)


@pytest.mark.parametrize("name", ["LoRA", "LoRA on lm_head", "IA3"])
def test_a_merged_adapter(name):
    def change(model, changes):
        return with_adapter(ADAPTERS[name])(model, changes).merge_and_unload()

    model = new_model()
    check(model, change)
    assert_served(model)


@pytest.mark.parametrize("name", ["LoRA", "LoRA on lm_head"])
def test_an_adapter_merged_in_place(name):
    def change(model, changes):
        adapted = with_adapter(ADAPTERS[name])(model, changes)
        generated(adapted)
        adapted.merge_adapter()
        return adapted

    check(new_model(), change)


@pytest.mark.parametrize("name", ["LoRA", "LoRA on lm_head", "IA3"])
def test_an_adapter_taken_off(name):
    model = new_model()
    before = generated(model)
    adapted = with_adapter(ADAPTERS[name])(model, None)
    changed = generated(adapted)
    with adapted.disable_adapter():
        assert generated(adapted) == naive(adapted) == before
    assert generated(adapted) == changed != before
    assert generated(adapted.unload()) == before


def test_an_adapter_that_learns():
    adapted = with_adapter(ADAPTERS["LoRA on lm_head"])(new_model(), None)
    before = generated(adapted)
    adapted.train()
    optimizer = torch.optim.SGD([one for one in adapted.parameters() if one.requires_grad], lr=2.0)
    adapted(input_ids=torch.tensor([[5, 9, 2]]), labels=torch.tensor([[7, 8, 2]])).loss.backward()
    optimizer.step()
    adapted.eval()
    assert generated(adapted) == naive(adapted) != before


def encode_with_prompt(model, batch):
    """What PEFT gives to the encoder in prompt tuning: the prompt's embeddings before the source's."""
    mask = batch["attention_mask"]
    prompt = model.get_prompt(batch_size=len(mask))
    embeds = torch.cat([prompt, model.word_embeddings(batch["input_ids"])], dim=1)
    mask = torch.cat([torch.ones(len(mask), prompt.shape[1], dtype=mask.dtype), mask], dim=1)
    return model.get_base_model().get_encoder()(inputs_embeds=embeds, attention_mask=mask).last_hidden_state, mask


def step_of_base_model(model, memory, mask, ids):
    """The encoder has seen the prompt, the decoder has none."""
    return plain_step(model.get_base_model(), memory, mask, ids)


def test_prompt_tuning():
    config = PromptTuningConfig(task_type=SEQ2SEQ, num_virtual_tokens=3, num_transformer_submodules=1)
    check(new_model(), with_adapter(config), encode=encode_with_prompt, step=step_of_base_model)


def step_after_prefix(model, memory, mask, ids):
    """The decoder's self-attention sees keys and values of the adapter before those of the target."""
    prefix = model.get_prompt(len(ids))
    inputs = {"encoder_outputs": (memory,), "attention_mask": mask, "decoder_input_ids": ids}
    return model.get_base_model()(**inputs, past_key_values=prefix).logits[:, -1]


def test_prefix_tuning():
    config = PrefixTuningConfig(task_type=SEQ2SEQ, num_virtual_tokens=3)
    check(new_model(), with_adapter(config, 3.0), step=step_after_prefix)


def test_adapters_are_given_as_the_reason():
    if not has_engine():
        pytest.skip("hf_vanilla_transformer.engine has no unsupported_reason")
    model = new_model()
    assert engine.unsupported_reason(model) is None
    adapted = get_peft_model(model, ADAPTERS["LoRA"])
    assert engine.unsupported_reason(model)
    assert engine.unsupported_reason(adapted)
    adapted.unload()
    assert engine.unsupported_reason(model) is None
