"""Just in time: checkpoints because of notices, and holding the ranks still for one.

Belongs to the coordinator's thread; `core.notice` decides when.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from raycheck.core.failure_rate import FailureKind
from raycheck.core.notice import Grace, Notice, ranks_to_spare
from raycheck.core.page import Plan
from raycheck.observe.events import EventLog
from raycheck.runtime import messages

logger = logging.getLogger("raycheck")


class Preempting:
    """What a coordinator does about an end that was announced.

    Args:
        events: Where notices are noted.
        lead_s: From asking until every rank can have seen a plan.
        ask: Asks for a checkpoint at the next step that all ranks can agree on; not before it has returned.
        tell_all: Sends an order to every agent.
    """

    def __init__(
        self,
        *,
        events: EventLog,
        lead_s: float,
        ask: Callable[[], None],
        tell_all: Callable[[messages.Order], None],
    ) -> None:
        self._events = events
        self._lead_s = lead_s
        self._ask = ask
        self._tell_all = tell_all
        self._grace = Grace(lead_s=lead_s)
        self._planned_s: dict[int, float] = {}
        self._hold_until_s: float | None = None
        self._held_plans: set[int] = set()
        self._spared: dict[int, tuple[int, ...]] = {}
        """By plan id, of those in flight."""

        self._may_spare = True
        self.held_step: int | None = None
        """The step at which all ranks stand still with a committed checkpoint; None: they do not."""

    def begin(self) -> None:
        """Start over with a new worker group: the end that was announced was the last one's."""
        self._grace = Grace(lead_s=self._lead_s)
        self._planned_s.clear()
        self._hold_until_s, self.held_step = None, None
        self._held_plans.clear()
        self._spared.clear()
        self._may_spare = True

    def judge(self, failure: FailureKind | None, lost_s: float) -> FailureKind | None:
        """Return what kind of failure ended the group, given what was announced and saved.

        One that came with enough notice to save has cost no work; one that was
        called a preemption and has is a lost node like any other.

        Args:
            failure: What Ray says; None: no failure.
            lost_s: When the last step was seen.
        """
        if failure is not None and failure != "exception" and self._grace.covers(lost_s):
            return "preempted"
        return "node" if failure == "preempted" else failure

    def hear(self, notice: Notice, now_s: float, generation: str) -> None:
        """Take in a notice; it may be repeated."""
        if self.held_step is not None:
            # Ranks that stand still, all of it saved, are being stopped: Ray tells their processes to end.
            return
        if not self._grace.hear(notice, now_s):
            return
        left = "no time was given" if notice.seconds_left is None else f"{notice.seconds_left:.0f} s are left"
        logger.warning("notice (%s): %s; %s; saving", notice.source, notice.detail or "the end is near", left)
        self._events.record(
            "notice",
            generation,
            source=notice.source,
            seconds_left=notice.seconds_left,
            detail=notice.detail,
        )

    def tick(self, now_s: float, *, persist_s: float, step_s: float) -> None:
        """Ask for what is due, and let go of ranks that were held for too long."""
        if self._grace.is_due(now_s, persist_s=persist_s, step_s=step_s):
            self._ask()
        if self._hold_until_s is not None and now_s > self._hold_until_s:
            self.release()

    def hold(self, seconds: float, now_s: float, plan: Plan | None) -> None:
        """Have all ranks stand still after the next snapshot, for a group that is about to be stopped."""
        self._hold_until_s = now_s + seconds
        if plan is not None:
            self._held_plans.add(plan.id)
            self._tell_all(self.order_for(plan))
        self._ask()

    def release(self) -> None:
        """Let the ranks go on."""
        self._hold_until_s, self.held_step = None, None
        self._held_plans.clear()
        self._tell_all(messages.ReleaseTraining())

    def publish(self, plan: Plan, now_s: float, *, node_of: Mapping[int, str], world_size: int) -> None:
        """Show the ranks a plan, whether to stand still at its step, and who takes no share.

        Args:
            plan: The plan.
            now_s: The time.
            node_of: The node of each rank, as far as it is known.
            world_size: Number of ranks.
        """
        self._planned_s = {plan.id: now_s}
        if self._hold_until_s is not None and self.held_step is None:
            self._held_plans.add(plan.id)
        if self._may_spare:
            self._spared[plan.id] = ranks_to_spare(self._grace.going, node_of, world_size)
        self._tell_all(self.order_for(plan))

    def order_for(self, plan: Plan) -> messages.PublishPlan:
        """Return the order that shows a plan: the same each time, for as long as it is in flight."""
        return messages.PublishPlan(plan, plan.id in self._held_plans, self._spared.get(plan.id, ()))

    def ended(self, plan: Plan, *, is_committed: bool, has_failed: bool, is_replaced: bool) -> None:
        """Say how an attempt has ended.

        Args:
            plan: Its plan.
            is_committed: A checkpoint came of it.
            has_failed: A rank's snapshot or upload failed.
            is_replaced: Another is about to be published in its place.
        """
        was_spared = bool(self._spared.pop(plan.id, ()))
        if is_committed:
            self._grace.committed(self._planned_s.get(plan.id, float("-inf")))
        elif was_spared and has_failed:
            # Larger shares may need more memory than those that stay can have.
            self._may_spare = False
            self._ask()
        if plan.id not in self._held_plans:
            return
        self._held_plans.discard(plan.id)
        if is_committed:
            self.held_step = plan.step
        else:
            # They stand where no other plan will find them.
            self._tell_all(messages.ReleaseTraining())
            if not is_replaced:
                self._ask()
