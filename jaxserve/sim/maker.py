"""Makes simulated instances from their plans, at the start and while others serve."""

from itertools import count

from jaxserve.control.plan import InstancePlan
from jaxserve.core.clock import Clock
from jaxserve.core.precision import assignment_id
from jaxserve.core.step_load import Loads
from jaxserve.engine.core import EngineCore
from jaxserve.kvcache import PagePool
from jaxserve.sim.cluster import Cluster
from jaxserve.sim.host_work import HostWork
from jaxserve.sim.instance import SimInstance
from jaxserve.sim.pipeline import Pipeline
from jaxserve.telemetry import EngineMetrics


class SimMaker:
    """A maker of the instances of a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        metrics: EngineMetrics,
        clock: Clock,
        token_times: dict[str, list[float]] | None,
    ):
        """Instances add the times of tokens to `token_times`, if it is given."""
        self.cluster = cluster
        self._metrics, self._clock, self._token_times = metrics, clock, token_times
        self._costs, self._numbers = cluster.true_costs, count()
        self.pipelines: list[Pipeline] = []  # of all instances with several stages, also of those that have ended

    def make(self, plan: InstancePlan, pages: PagePool | None = None) -> SimInstance:
        """Return an instance without requests. `pages` are its KV pages if some of them have contents."""
        cluster, memory = self.cluster, self.cluster.memory
        scheduler, _ = memory.scheduler(plan, pages)
        buckets = memory.buckets_of(plan.tp)
        core = EngineCore(
            scheduler,
            cluster.info,
            None,
            self._metrics,
            salt=assignment_id(plan.layer_precisions),
            plan_fields=memory.plan_fields(plan, memory.plan.version),
            index=next(self._numbers),
            name=plan.name,
            loads=Loads(buckets),
            cost=cluster.costs.of(plan) if memory.variants else None,
            capacity=memory.max_len(plan.tp),
            stages=len(plan.stages),
        )
        instance = SimInstance(
            core,
            plan,
            self._costs,
            buckets,
            self._clock,
            token_times=self._token_times,
            host_work=HostWork.of(cluster.hardware.overheads, fused=plan if cluster.config.fuse is not False else None),
        )
        if instance.pipeline is not None:
            self.pipelines.append(instance.pipeline)
        return instance
