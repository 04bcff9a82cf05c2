"""Pushing the trained model to the Hugging Face hub, or saying beforehand why it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tba.trainer_api.config import TBAConfig


class Hub:
    """Where `push_to_hub` pushes to."""

    def __init__(self, args: TBAConfig) -> None:
        """Nothing is asked of the hub yet."""
        self._args = args
        self._repository = args.hub_model_id or Path(args.output_dir or "trainer_output").absolute().name

    def problems(self) -> list[str]:
        """Why nothing can be pushed, where it is asked for: the hub is off, out of reach, or refuses the repository.

        The repository is made if it is not there.
        """
        if not self._args.push_to_hub:
            return []
        from httpx2 import HTTPError
        from huggingface_hub import constants
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

        if constants.HF_HUB_OFFLINE:
            return ["push_to_hub = True, and HF_HUB_OFFLINE turns the hub off; leave it out, and push final/ of "
                    "the run directory later."]
        try:
            made = self._api().create_repo(self._repository, private=self._args.hub_private_repo, exist_ok=True)
        except (OSError, ValueError, HTTPError, HfHubHTTPError, LocalTokenNotFoundError) as error:
            said = (str(error).strip().splitlines() or [""])[0]
            return [f"push_to_hub = True: repository {self._repository!r} cannot be had ({type(error).__name__}: "
                    f"{said}); leave it out, and push the folder final/ of the run directory later."]
        self._repository = made.repo_id
        return []

    def push(self, folder: Path, message: str) -> Any:
        """Uploads a model folder; returns what the hub says of the commit."""
        return self._api().upload_folder(
            repo_id=self._repository, folder_path=folder, commit_message=message, revision=self._args.hub_revision
        )

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(token=self._args.hub_token)
