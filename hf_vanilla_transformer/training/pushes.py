"""Seq2SeqTrainer that sends to the Hub what `vanilla-transformer push` sends: the model and its card, in one commit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import Seq2SeqTrainer

from ..hub.facts import said_by_author, strings, with_what_was_said
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
            if self.hub_model_id is not None and self._is_private(private):
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

        Args:
            commit_message: The commit's first line.
            token: For the Hub; None: that of the arguments, or the saved one.
            revision: A branch; None: that of the arguments, or main.
            private: Whether only its owner may see the repository, so that a public one is refused; None: as the
                arguments say.
            **kwargs: Of `create_model_card`: language, license ...

        Returns:
            Where the model is. None in other processes than the main one.

        Raises:
            PublishError: There is no token, the user may not write there, or it is public already.
            ConnectionError: The Hub can't be reached, or fails.
            TypeError: `blocking` is given: it always waits.
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
            private=self._is_private(private),
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

        The arguments are those of `Trainer.create_model_card`; languages are ISO 639 codes, `model_name` is the card's
        title, and others than these are ignored.
        """
        if self.is_world_process_zero():
            facts = replace(
                run_facts(self),
                title=model_name,
                languages=strings(language),
                license=license,
                tags=strings(tags),
                base_model=finetuned_from,
                datasets=strings(dataset_tags),
            )
            folder = Path(self.args.output_dir or "")
            save_card(folder, with_what_was_said(facts, said_by_author(folder)))

    def _is_private(self, private: bool | None) -> bool:
        return bool(self.args.hub_private_repo if private is None else private)
