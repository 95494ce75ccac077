"""Wires the verifier: `python -m paceline_verifier --model MODEL`."""

from __future__ import annotations

from paceline.messages import VerifierCommand, VerifierEvent
from paceline.runtime.connect import ConnectLimits
from paceline.runtime.process import main
from paceline.runtime.replica_service import Replica
from paceline_verifier.servicer import VerifierService, verifier_door
from paceline_verifier.settings import VerifierSettings


def make_service(settings: VerifierSettings) -> VerifierService:
    """The service, which loads the model when it is started."""
    settings.apply_to_process()

    def load() -> Replica[VerifierCommand, VerifierEvent]:
        # Here, because it imports torch: by now the process listens and is bound to its cores.
        from paceline_verifier.load import load_replica

        return load_replica(settings)

    return VerifierService(verifier_door(ConnectLimits.within(settings.max_message_bytes)), load)


if __name__ == "__main__":
    main("verifier", VerifierSettings, make_service)
