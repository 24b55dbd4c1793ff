"""A configuration that is pushed by itself, with its code."""

from hub_client import PACKAGE, REPO

from hf_vanilla_transformer import VanillaTransformerConfig


def test_a_configuration_is_pushed_with_its_code_and_the_licence_of_that(hub, tmp_path):
    config = VanillaTransformerConfig(d_model=32, encoder_attention_heads=4, decoder_attention_heads=4)
    config.save_pretrained(str(tmp_path / "it"), push_to_hub=True, repo_id=REPO)
    files = hub.repositories[REPO].files()
    assert files["config.json"] == (tmp_path / "it" / "config.json").read_bytes()
    assert (
        files["configuration_vanilla_transformer.py"] == (PACKAGE / "configuration_vanilla_transformer.py").read_bytes()
    )
    assert files["LICENSE-CODE"] == (PACKAGE / "LICENSE").read_bytes()
