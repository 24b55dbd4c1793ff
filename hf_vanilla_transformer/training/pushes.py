"""Seq2SeqTrainer that sends to the Hub what `vanilla-transformer push` sends: the model and its card, in one commit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import Seq2SeqTrainer

from ..hub.facts import inherited, said_by_author, said_in, with_what_was_said
from ..hub.model_card import save_card
from ..hub.upload import Published, PublishError, check_private, hub_errors, prepare, publish
from .arguments import VanillaTransformerTrainingArguments
from .run_facts import run_facts


class PushingTrainer(Seq2SeqTrainer):
    """Seq2SeqTrainer with `push_to_hub` and `create_model_card` of this package."""

    args: VanillaTransformerTrainingArguments

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Creates the repository as the Trainer does, and refuses what `push_to_hub` couldn't send there."""
        if hasattr(self.model, "peft_config"):
            raise PublishError("the model has adapters; publish them with PEFT: model.push_to_hub(...) after training")
        with hub_errors(self.args.hub_model_id or Path(self.args.output_dir or "").resolve().name):
            super().init_hf_repo(token, private)
            if self.hub_model_id is not None and (self.args.hub_private_repo if private is None else private):
                check_private(HfApi(token=token or self.args.hub_token), self.hub_model_id)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Published | None:
        """Saves and uploads model, tokenizer, code and card, without files that only training needs.

        Arguments are those of the Trainer's without `blocking`, as it always waits, and of `create_model_card`; a
        public repository is refused if it has to be private. Errors are those of `prepare` and `publish`.

        Returns:
            Where the model is. None in other processes than the main one.
        """
        if "blocking" in kwargs:
            raise TypeError("push_to_hub() always waits until all is sent; leave blocking out")
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)  # by all processes, each of which may have a part of it
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**kwargs)
        return publish(
            prepare(Path(self.args.output_dir or ""), str(self.hub_model_id)),
            str(self.hub_model_id),
            private=bool(self.args.hub_private_repo if private is None else private),
            message=commit_message,
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
        )

    def create_model_card(
        self,
        language: str | Sequence[str] | None = None,
        license: str | None = None,
        tags: str | Sequence[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        dataset_tags: str | Sequence[str] | None = None,
        **kwargs: object,
    ) -> None:
        """Writes the model's card into the run's folder, and keeps the metadata of an older one there.

        The arguments are those of `Trainer.create_model_card`; `model_name` is the title, and others are ignored.
        """
        if not self.is_world_process_zero():
            return
        folder, said = Path(self.args.output_dir or ""), {"language": language, "license": license, "tags": tags}
        said |= {"base_model": finetuned_from, "datasets": dataset_tags}
        facts = replace(run_facts(self), title=model_name, **said_in(said))
        save_card(folder, with_what_was_said(facts, inherited(self.model.name_or_path) | said_by_author(folder)))
