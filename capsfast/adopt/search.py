"""capsfast.identify: finds the options with which capsfast computes what a layer computes, by trial."""

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..calls import checks
from . import squashes, structures
from .identification import Identification, unwrapped
from .inputs import ADDITIVE, COUNTS, UNKNOWN, Inputs, binary
from .orders import follow, steps_to
from .probe import Run, modes_swapped
from .squashes import OTHER_DIRECTION, SAME_DIRECTION, no_options, off_direction
from .trace import BATCHES, BranchError, UntraceableError
from .trial import OP, SAME, SAME_ON_REAL, NotReproduced, Trial, backend_for, capsules, relative

# A factor of u that makes all coupling equal.
NEAR_0 = 1e-5
# Two lengths of weighted sums: sums of the first length show eps, sums of the second length show the coupling.
LENGTHS = (3e-5, 1e-2)
# Largest number of entries in the votes with which a call is compared on u.
QUICK = 2**20


def identify(
    layer: nn.Module,
    u: Tensor,
    *others: Any,
    call: Callable[..., Any] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Identification:
    """Finds the call of capsfast that computes what a routing layer computes.

    The layer is judged by what it computes, not by its name. A float64 copy runs on random numbers, and with its own
    parameters on ``u``. Its outputs and gradients are compared with :func:`capsfast.dynamic_routing`, or with
    :func:`capsfast.route_votes` if the layer takes votes. Shapes limit the possible orders of the axes of parameters,
    input and output. Votes near 0, whose coupling is equal, decide between these orders and show squash and eps.
    Tensors and arguments that the call does not read must have no effect with other numbers either. The layer, its
    mode, its gradients and the state of torch's random numbers are left unchanged.

    Args:
        layer: any module that routes ``u [B, I, K]`` or votes ``[B, I, J, D]``, in any order of axes with B first.
            DataParallel, DistributedDataParallel and a compiled wrapper are removed first, also from names.
        u: a real input; a few samples are enough.
        others: real further arguments of the forward. A tensor of 0 and 1 can be a mask, any other tensor logits. An
            int equal to the batch size may mean the batch size.
        call: ``call(layer, u, *others)``, if the layer is not called as ``layer(u, *others)``. Other values in it
            count as constants.
        output: takes the result of the layer and returns the output; default the first tensor of a tuple.

    Returns:
        :class:`capsfast.adopt.Identification`: print it, or call it. Values differ by at most 1e-10, relative; with the
        layer's own parameters on ``u``, where rounding may be amplified, values and gradients by at most 1e-8.

    Raises:
        capsfast.adopt.NotReproduced: a ValueError. No options reproduce the layer, it fails in float64, torch can't
            trace it, or its result is random, or depends on the mode, on earlier calls, or on a tensor or argument that
            the call does not read. The message gives the reason and the nearest call.
        TypeError, ValueError: layer is not a module; u is empty or not a dense float tensor with at least two axes.

    Example:
        >>> found = capsfast.identify(layer, u)  # your layer, and input capsules for it
        >>> print(found.code())
        weight = layer.weight.permute(1, 0, 2, 3)  # [J, I, D, K]
        v = capsfast.dynamic_routing(u, weight, gradient='last', squash='eps_outside')
    """
    if not isinstance(layer, nn.Module):
        raise TypeError(f"{OP}: layer must be a torch.nn.Module, got {type(layer).__name__}")
    if not isinstance(u, Tensor):
        raise TypeError(f"{OP}: u must be a torch.Tensor, got {type(u).__name__}")
    checks.dense(OP, "u", u)
    checks.floating(OP, "u", u)
    if u.dim() < 2 or u.numel() == 0:
        raise ValueError(f"{OP}: u must be input capsules [B, I, K] or votes [B, I, J, D], got {checks.shape_of(u)}")
    layer = unwrapped(layer)
    names = () if call or isinstance(layer, torch.jit.ScriptModule) else inspect.signature(layer.forward).parameters
    identification, _ = searched(layer, u, others, call, output, tuple(names))
    return identification


def searched(
    layer: nn.Module,
    u: Tensor,
    others: tuple[Any, ...],
    call: Run | None = None,
    output: Run | None = None,
    names: Sequence[str] = (),
) -> "tuple[Identification, Search]":
    """The identification of a layer, and the search that found it. names: of the arguments of the forward, u first.

    Raises:
        NotReproduced: capsfast has no such call.
    """
    devices = [u.device.index] if u.device.type == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(u.device.type, enabled=False)
        if torch.amp.is_autocast_available(u.device.type)
        else nullcontext(),
        torch.random.fork_rng(devices),
    ):
        search = Search(layer, Inputs(u.detach(), others), call, output)
        search.names = names
        return search.result(), search


class Search(Trial):
    """
    Attributes:
        notes: observations in words. doubts: observations of differences between layer and call.
        single: whether layer and call agree for one sample.
        miss: the candidate for the call that came farthest: how far, why it fails, and the candidate.
        names: names of the arguments of the forward, as far as known. still: arguments that have their neutral values.
    """

    names: Sequence[str] = ()
    still: tuple[int, ...] = ()

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.notes: list[str] = []
        self.doubts: list[str] = []
        self.single = True
        self.miss: tuple[float, str, Identification] | None = None
        # Operations that only special numbers show. They are reported last, because numbers give better reasons.
        self.thresholds: dict[str, None] = {}

    def result(self) -> Identification:
        if any(isinstance(module, torch.jit.ScriptModule) for module in self.probe.layer.modules()):
            raise self.refused(
                "its forward is TorchScript, which torch can't trace; identify the layer before it is scripted"
            )
        first = self.run(replace(self.inputs, u=self.inputs.u.clone().requires_grad_()))
        if first.dim() < 2 or not first.is_floating_point():
            raise self.refused(f"its output {checks.shape_of(first)} holds no capsules [B, J, D]")
        if not first.requires_grad:
            raise self.refused("its output has no gradient, as under torch.no_grad")
        reads = self._traced()
        if not relative(self.probe(self.inputs, gradient=False).nan_to_num(), first.nan_to_num()) < SAME:
            raise self.refused("it computes something else under torch.no_grad")
        if self.probe.hooked:
            self.notes.append("modules in it have hooks, which the call leaves out")
        if self.probe.built:
            self.notes.append(f"the first forward makes {', '.join(self.probe.built)}")
        if self.probe.written:
            self.notes.append(f"its forward changes {', '.join(self.probe.written)}, the call does not")
        self.draw_again(self.probe.names)
        self.inputs = self.inputs.random(self.draw)
        mattering = [name for name in self.probe.names if name in reads]
        routed = self._first_routed(mattering)
        if routed is None:
            raise self.refused(self._why_argument(reads, mattering) or self._why_none(mattering))
        identification = self._with_arguments(self._with_parameters(routed, mattering), reads)
        self._check_reads(identification, reads)
        identification, reads = self._with_entries(self._with_gradient(identification), reads)
        self._check_reads(identification, reads)
        return self._verified(identification)

    def _check_reads(self, identification: Identification, reads: frozenset[str]) -> None:
        unread = [name for name in self.probe.places if name in reads and name not in identification.names]
        if unread:
            raise self.refused(f"its output depends on `{unread[0]}`, which the call does not read")
        if self.thresholds:
            raise self.refused(
                f"its forward or its gradient applies {', '.join(self.thresholds)}, which only some numbers show, and "
                f"capsfast does not"
            )

    def _traced(self, *parts: int) -> frozenset[str]:
        """Names of the tensors that the output depends on, the same in both modes.

        Raises:
            NotReproduced: the layer does something that probing can't show: random numbers, branches, other tensors.
        """
        try:
            program = self.probe.trace(self.inputs, *parts)
            with modes_swapped(self.probe.layer):
                other = self.probe.trace(self.inputs, *parts)
            conditions = () if self.fixed else self._conditions()
        except BranchError as error:
            raise self.refused(
                "its forward branches on numbers in a tensor (by if, .item() or the like), so others may go another way"
            ) from error
        except UntraceableError as error:
            raise self.refused(f"torch cannot trace it, so numbers may hide what it does: {error}") from error
        if program.random or other.random:
            raise self.refused("it draws random numbers (logits that start at random, or dropout)")
        if program.program != other.program:
            raise self.refused("it computes something else in training mode than in evaluation mode, as dropout does")
        if conditions:
            raise self.refused(f"its forward goes by the number B of samples: {' and '.join(conditions)}")
        if program.outside:
            raise self.refused(
                "its output depends on a tensor in a list, a mapping, an array or outside of it; make that a buffer"
            )
        self.thresholds |= dict.fromkeys(program.thresholds)
        return program.reads

    def _conditions(self) -> tuple[str, ...]:
        """The forward's conditions on the number of samples, if they change the operations."""
        lengths = {size for name in self.probe.places for size in self.probe.tensor(name).shape}
        for tensor in (self.inputs.u, *self.inputs.others):
            lengths |= set(tensor.shape[1:]) if isinstance(tensor, Tensor) else set()
        apart = self.inputs.batch(next(size for size in itertools.count(5) if size not in lengths))
        conditions = self.probe.trace(apart, symbolic=True).conditions
        # Code such as a loop over samples is traced for one number of samples but does the same for other numbers.
        named = {int(number) + more for line in conditions for number in re.findall(r"\d+", line) for more in (0, 1)}
        sizes = {2, 17, 64, 300, *(size for size in named if 1 < size <= BATCHES[-1])}
        several = (self.inputs, self.given.double(), *map(self.inputs.batch, sorted(sizes)))
        return conditions if conditions and len({self.probe.trace(inputs).operations for inputs in several}) > 1 else ()

    def _first_routed(self, mattering: list[str]) -> Identification | None:
        for weight in [*sorted(mattering, key=lambda name: -self.probe.true[name].numel()), None]:
            routed = self._routed(weight, [name for name in mattering if name != weight])
            if routed is not None:
                return routed
        return None

    def _why_argument(self, reads: frozenset[str], mattering: list[str]) -> str | None:
        """The reason, if an argument is padding or lengths: with a value that takes nothing out, the layer routes."""
        inputs, miss, nearest = self.inputs, self.miss, self.nearest
        try:
            for n in (n for n in range(len(inputs.others)) if f"argument {n + 2}" in reads):
                for reason, value in inputs.absent(n):
                    self.inputs, self.still = inputs.with_other(n, value), (n,)
                    try:
                        routed = self._first_routed(mattering)
                    except NotReproduced:  # the layer fails on such a number, which may be an index
                        routed = None
                    # A flag of samples or of output capsules is no padding.
                    if routed and (reason == COUNTS or value.numel() in (routed.sizes.I, self.B * routed.sizes.I)):
                        nearest = None
                        return self._of_argument(n, reason)
        finally:
            self.inputs, self.still, self.miss, self.nearest = inputs, (), miss, nearest
        return None

    def _of_argument(self, n: int, reason: str) -> str:
        known, value = self.names[n + 1 : n + 2], self.inputs.others[n]
        name = known[0] if known else "it"
        opposite = f"~{name}" if isinstance(value, Tensor) and value.dtype == torch.bool else f"{name} == 0"
        told = f" (`{name}`)" if known else ""
        return f"argument {n + 2} of the forward{told} {reason.format(name=name, opposite=opposite)}"

    def _routed(self, weight: str | None, rest: list[str]) -> Identification | None:
        """The call without logits and bias, if this tensor is the weight; else None."""
        neutral = self.inputs.neutral(self.still)
        # A tensor of zeros that the layer multiplies by, such as a mask, would make the output 0: then try ones.
        for value in (0.0, 1.0):
            self.probe.set({name: torch.full_like(self.probe.true[name], value) for name in rest})
            output = self.run(neutral.scaled(NEAR_0)).detach()
            if output.any():
                break
        shape = () if weight is None else tuple(self.probe.true[weight].shape)
        for candidate in structures.calls(weight, shape, tuple(neutral.u.shape), tuple(output.shape)):
            total, v = self.votes(candidate, neutral.u).sum(1), capsules(candidate, output)
            off = off_direction(v, total)
            if off < SAME_DIRECTION:
                identification = self._with_options(candidate, neutral, total)
                if identification is not None:
                    return identification
            else:
                self._missed((1 - min(off, 2) / 4, OTHER_DIRECTION), candidate)
        self.draw_again(rest)
        return None

    def _missed(self, why: tuple[float, str], candidate: Identification) -> None:
        """Keeps the reason of the candidate that came farthest."""
        if self.miss is None or why[0] > self.miss[0]:
            self.miss = (*why, candidate)

    def _with_options(self, candidate: Identification, inputs: Inputs, total: Tensor) -> Identification | None:
        sizes = candidate.sizes
        length = float(total.square().sum(-1).mean().sqrt()) / sizes.J
        levels = [inputs.scaled(scale / length).spread() for scale in LENGTHS]
        sums = [self.votes(candidate, level.u).sum(1) for level in levels]
        results = [capsules(candidate, self.run(level)).detach() for level in levels]
        fitting = squashes.fits(sums, results, sizes.I, sizes.J)
        tries = (replace(candidate, **options) for options in squashes.options(fitting))
        equal = self._first_equal(tries, self.moderate(candidate).neutral(self.still))
        if equal is None:
            self._missed(no_options(sums, results, bool(fitting)), candidate)
        return equal

    def _first_equal(self, tries: Iterable[Identification], inputs: Inputs) -> Identification | None:
        """The first of the calls that gives what the layer gives."""
        output = self.run(inputs)
        return next((candidate for candidate in tries if self.difference(candidate, inputs, output) < SAME), None)

    def _why_none(self, mattering: list[str]) -> str:
        depends = ", ".join(f"`{name}` {checks.shape_of(self.probe.true[name])}" for name in mattering)
        if self.miss is None:
            return (
                f"input {checks.shape_of(self.inputs.u)}, output {checks.shape_of(self.run(self.inputs))} and the "
                f"parameters that its output depends on ({depends or 'none'}) do not have the axes of one routing: "
                "[B, I, K] and a weight of I, J, D, K, or votes [B, I, J, D], to [B, J, D]"
            )
        _, reason, candidate = self.miss
        if self.nearest is None:
            options = itertools.product(("out", "in"), (3, 2, 1))
            tries = (replace(candidate, softmax=softmax, num_iterations=n) for softmax, n in options)
            self._first_equal(tries, self.moderate(candidate))
        return reason + (f" (its output depends on {depends})" if len(mattering) > 1 else "")

    def _with_parameters(self, identification: Identification, mattering: list[str]) -> Identification:
        """Adds the roles of the tensors besides the weight, one after the other."""
        inputs = self.moderate(identification).neutral()
        for name in (name for name in mattering if name != identification.weight):
            self.draw_again([name])
            self._start_anew(identification, inputs)
            shape = self.probe.true[name].shape
            role = self._first_equal(structures.roles(name, tuple(shape), identification), inputs)
            if role is None:
                raise self.refused(
                    f"its output depends on `{name}` {list(shape)}, which is neither logits, nor a bias of the "
                    "weighted sum"
                )
            identification = role
        return identification

    def _with_arguments(self, identification: Identification, reads: frozenset[str]) -> Identification:
        """Adds the roles of the further arguments of the forward."""
        for n, value in enumerate(self.inputs.others):
            inputs = self.moderate(identification).neutral(range(n + 1))
            self._start_anew(identification, inputs)
            for role, order in self.inputs.roles(n, identification.sizes._asdict(), f"argument {n + 2}" in reads):
                if identification.averaged and (
                    role == "mask_after" or (role == "mask" and identification.softmax == "in")
                ):
                    continue  # with averaged logits all samples must have the same softmax
                tried = replace(
                    identification,
                    arguments=(*identification.arguments, role),
                    argument_orders=(*identification.argument_orders, order),
                )
                factor = role == "mask_after" and value.is_floating_point()
                if self._first_equal([tried], inputs.with_other(n, 0.7 * value) if factor else inputs):
                    identification = tried
                    break
            else:
                added = isinstance(value, Tensor) and value.is_floating_point() and not binary(value)
                reason = COUNTS if self.inputs.counts(n) else ADDITIVE if added else UNKNOWN
                raise self.refused(self._of_argument(n, f"changes its output and {reason}"))
        return identification

    def _start_anew(self, candidate: Identification, inputs: Inputs) -> None:
        """Forgets the nearest call, because differences on new numbers can't be compared with earlier ones."""
        self.nearest = None
        self._first_equal([candidate], inputs)

    def _with_entries(
        self, identification: Identification, reads: frozenset[str]
    ) -> tuple[Identification, frozenset[str]]:
        """Adds the meanings of the entries of the layer's tuple, and the tensors that they depend on."""
        outputs = self.probe.outputs(inputs := self.moderate(identification))
        if not isinstance(outputs, (tuple, list)) or self.probe.part is None:
            return identification, reads
        asked = replace(identification, entries=("lengths", "coupling"))
        lengths, c = asked.results(self.probe.tensors(), inputs.u, *inputs.others, backend=backend_for(inputs))
        known = {**identification.sizes._asdict(), "B": self.B}
        entries = ["other"] * len(outputs)
        for n, value in enumerate(outputs):
            if n == self.probe.part or value is None:
                entries[n] = "None" if value is None else "output"
            elif isinstance(value, Tensor):
                if relative(lengths, value) < SAME:
                    entries[n] = "lengths"
                for order, _ in structures.orders(tuple(value.shape), "BIJ", known):
                    if relative(follow(c, steps_to(order, "BIJ")), value) < SAME and "coupling" not in entries:
                        entries[n], identification = "coupling", replace(identification, coupling_order=order)
        tried = replace(identification, entries=tuple(entries))
        more = [n for n, entry in enumerate(entries) if entry in ("lengths", "coupling")]
        if more and not self.gradient_difference(tried, inputs) < SAME:  # an entry may be detached
            more, tried = (
                [],
                replace(tried, entries=tuple("other" if n in more else entry for n, entry in enumerate(entries))),
            )
        return tried, reads | self._traced(*more) if more else reads

    def _with_gradient(self, identification: Identification) -> Identification:
        inputs = self.moderate(identification)
        differences = {}
        for gradient in ("full", "last"):
            tried = replace(identification, gradient=gradient)
            difference = self.gradient_difference(tried, inputs)
            if difference < SAME:
                for n, role in enumerate(identification.arguments):
                    if "mask" in role:
                        self._doubt_mask(tried, n, inputs)
                return replace(tried, gradient_difference=difference)
            differences[difference] = tried
        nearest = min(differences)
        self.nearest = nearest, differences[nearest]
        raise self.refused(
            "its values are as in the call, but its gradient goes neither through all iterations nor through the "
            "last one alone"
        )

    def _doubt_mask(self, identification: Identification, n: int, inputs: Inputs) -> None:
        """Records a doubt if layer and call differ for masks of other numbers, or of zeros only."""

        def differs(mask: Tensor) -> bool:
            changed = inputs.with_other(n, mask)
            output = self.run(changed)
            return bool(output.isfinite().all()) and not relative(self.evaluate(identification, changed), output) < SAME

        mask = inputs.others[n]
        numbers = (2, -1, 0.3) if mask.is_floating_point() else () if mask.dtype == torch.bool else (2, -1)
        if any(differs(number * mask) for number in numbers):
            self.doubts.append(
                f"argument {n + 2} is a mask of 0 and 1 alone: the layer computes something else for other numbers, "
                "the call takes them for 1"
            )
        if differs(torch.zeros_like(mask)):
            self.doubts.append(
                f"for a sample whose mask, argument {n + 2}, is 0 everywhere, the layer computes something else than "
                "the call"
            )

    def _verified(self, identification: Identification) -> Identification:
        """Compares with the layer's own parameters on u, on a single sample, and on special numbers."""
        moderate = self.moderate(identification)
        forward, gradient = (
            [self.difference(identification, moderate, self.run(moderate))],
            [identification.gradient_difference],
        )
        self.probe.set(self.probe.true)
        # As many samples of u as run quickly, but at least self.B.
        quick = QUICK // (identification.sizes.I * identification.sizes.J * identification.sizes.D)
        real = self.given.batch(max(self.B, min(self.given.u.shape[0], quick))).double()
        if bool(self.run(real).isfinite().all()):
            forward.append(self._difference_of_finite(identification, real, "with its parameters and on u"))
            gradient.append(self.gradient_difference(identification, real))
        else:
            self.notes.append("on u the layer gives numbers that are not finite, so only random ones were compared")
        self._check_one_sample(identification, real.batch(1))
        self.draw_again(self.probe.names)
        first = torch.zeros_like(moderate.u, dtype=torch.bool)
        first[0] = True
        for words, number in (("0", 0.0), ("NaN", float("nan")), ("infinite", float("inf"))):
            special = replace(moderate, u=moderate.u.masked_fill(first, number))
            self._difference_of_finite(identification, special, f"with a sample that is {words}", zero=number == 0)
        if not gradient[-1] < SAME_ON_REAL:
            self.nearest = gradient[-1], identification
            raise self.refused("with its parameters and on u it has a different gradient than on random numbers")
        return replace(
            identification,
            forward_difference=max(forward),
            gradient_difference=max(gradient),
            notes=(*self.notes, *self.doubts),
        )

    def _difference_of_finite(
        self, identification: Identification, inputs: Inputs, where: str, zero: bool = False
    ) -> float:
        """The difference where the layer's results are finite. Elsewhere the call's must not be, unless ``zero``.

        Raises:
            NotReproduced: layer and call differ.
        """
        output, ours = self.run(inputs).detach(), self.evaluate(identification, inputs).detach()
        finite = output.isfinite()
        difference = relative(ours[finite], output[finite])
        if not difference < SAME_ON_REAL or not (zero or bool((finite | ~ours.isfinite()).all())):
            self.nearest = difference, identification
            raise self.refused(f"{where} it computes something else than on random numbers")
        return difference

    def _check_one_sample(self, identification: Identification, one: Inputs) -> None:
        try:
            output = self.probe(one)
        except Exception as error:
            self.single = False
            self.notes.append(f"the layer fails on a single sample, with {type(error).__name__}")
            return
        ours = self.evaluate(identification, one)
        self.single = ours.shape == output.shape
        if not self.single:
            self.notes.append(
                f"for a single sample the layer gives {checks.shape_of(output)}, the call {checks.shape_of(ours)}"
            )
        elif bool(output.isfinite().all()):
            self._difference_of_finite(identification, one, "with its parameters and on one sample of u")
