"""Wires the drafter: `python -m paceline_drafter --method ngram,draft_model --model MODEL`."""

from __future__ import annotations

from paceline.messages import DrafterCommand, DrafterEvent
from paceline.runtime.connect import ConnectLimits
from paceline.runtime.process import main
from paceline.runtime.replica_service import Replica
from paceline_drafter.servicer import DrafterService, drafter_door
from paceline_drafter.settings import DrafterSettings


def make_service(settings: DrafterSettings) -> DrafterService:
    """The service, which loads the method when it is started."""
    settings.apply_to_process()

    def load() -> Replica[DrafterCommand, DrafterEvent]:
        # Here, because it imports torch: by now the process listens and is bound to its cores.
        from paceline_drafter.load import load_replica

        return load_replica(settings)

    return DrafterService(drafter_door(ConnectLimits.within(settings.max_message_bytes)), load)


if __name__ == "__main__":
    main("drafter", DrafterSettings, make_service)
