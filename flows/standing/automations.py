"""Automations of the Prefect server: dead runs are marked as Crashed, notifications are sent."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import AutomationCore, EventTrigger, Posture, ResourceSpecification
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.states import StateType

from flows import HEARTBEAT_SECONDS
from flows.stage import REFUSED

_SILENT_SECONDS = 3 * HEARTBEAT_SECONDS
_EVERY_RUN = {"prefect.resource.id": "prefect.flow-run.*"}
# States, by name, in which nothing need send a heartbeat.
_ENDS = (
    *("Completed", "Failed", "Cancelled", "Crashed", "TimedOut", REFUSED),
    *("Paused", "Suspended", "AwaitingRetry"),
)
# Names an address that takes JSON by POST: a secret, so it is no option of a command.
NOTIFY_VARIABLE = "GEB_NOTIFY_URL"
_NOTIFY_BLOCK = "geb-notify"
_FLOWS = ("iterate", "evaluate", "sweep", "paper", "compare", "bandit")
# Stages are flow runs, too, where a work pool runs them; nobody wants to hear of each.
_WATCHED = (*_FLOWS, "stage")


def _of_flows(names: Sequence[str]) -> ResourceSpecification:
    """Resource filter for the events of runs of these flows."""
    return ResourceSpecification.model_validate(
        {"prefect.resource.role": "flow", "prefect.resource.name": list(names)}
    )


def zombie_automation() -> AutomationCore:
    """Marks a flow run as Crashed that stops sending heartbeats without having ended.

    A killed orchestrator cannot report its end: without this, its flow run stays Running for ever.
    """
    return AutomationCore(
        name="geb: a run without a heartbeat has crashed",
        description="Press Retry on such a run: what is done stays done.",
        trigger=EventTrigger(
            # Of a process that is killed in its first seconds Running is the only event.
            after={"prefect.flow-run.Running", "prefect.flow-run.heartbeat"},
            expect={f"prefect.flow-run.{each}" for each in ("heartbeat", *_ENDS)},
            match=ResourceSpecification.model_validate(_EVERY_RUN),
            # Other people's flows may send none.
            match_related=_of_flows(_WATCHED),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=_SILENT_SECONDS),
        ),
        actions=[
            ChangeFlowRunState(
                name="Crashed",
                state=StateType.CRASHED,
                message="no heartbeat: its process was killed, or its machine is gone",
            )
        ],
    )


def notification(block: UUID) -> AutomationCore:
    """Tells people when a run has ended, and how.

    Args:
        block: Notification block of the Prefect server that says where to.
    """
    return AutomationCore(
        name="geb: tell when a run has ended",
        description="Failed, crashed and completed runs of the pipeline.",
        trigger=EventTrigger(
            expect={f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Crashed")},
            match=ResourceSpecification.model_validate(_EVERY_RUN),
            match_related=_of_flows(_FLOWS),
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            SendNotification(
                block_document_id=block,
                subject="{{ flow_run.name }}: {{ flow_run.state.name }}",
                body="{{ flow_run.state.message or '' }}\n{{ flow_run|ui_url }}",
            )
        ],
    )


def install_automations() -> list[str]:
    """Creates the automations on the server in use, or updates them.

    Notifications are sent to the address in ``GEB_NOTIFY_URL``; without it none are set up.

    Returns:
        Names of the automations.
    """
    wanted = [zombie_automation()]
    if address := os.environ.get(NOTIFY_VARIABLE):
        block = CustomWebhookNotificationBlock(
            name=_NOTIFY_BLOCK, url=address, json_data={"text": "{{subject}}\n{{body}}"}
        )
        saved = block.save(_NOTIFY_BLOCK, overwrite=True)
        assert isinstance(saved, UUID)
        wanted.append(notification(saved))
    with get_client(sync_client=True) as client:
        for each in wanted:
            _install(client, each)
    return [each.name for each in wanted]


def _install(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Creates an automation, or updates the one of that name."""
    found = client.read_automations_by_name(automation.name)
    if found:
        client.update_automation(found[0].id, automation)
    else:
        client.create_automation(automation)
