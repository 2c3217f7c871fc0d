"""Published routing layers, on the fused ops. docs/migration.md lists them.

Sizes are I and J, the numbers of input and output capsules, and K and D, the lengths of an input and an output capsule.
``eps`` is that of the squash. Inputs are float32, float64, bfloat16 or float16.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import overload

from .. import kinds
from ..calls import checks
from ..functional import dynamic_routing, route_votes, squash
from ..kinds import NO_EPS, FewSums, Layout, MoreSums
from ..nn import _arguments
from ..nn._layer import hooked
from ..passes import routing_pass
from .published import PublishedLayer, SharedName

# Axes of weights.
IJDK, IJKD, JIDK, JIKD = ("I", "J", "D", "K"), ("I", "J", "K", "D"), ("J", "I", "D", "K"), ("J", "I", "K", "D")


class DynamicRouting(SharedName):
    """Dynamic routing (Sabour, Frosst, Hinton 2017, procedure 1). Four layers have this name:

    * ``in_capsules, out_capsules, in_dim, out_dim, num_iterations``, called with ``x``. ``W [1, in_capsules,
      out_capsules, out_dim, in_dim]`` starts as ``torch.randn``.
    * ``num_iterations``, from 1 to 10, called with votes ``u_hat [B, I, J, D]`` and perhaps ``batch_size``.
    * ``num_input_capsules, num_output_capsules, input_capsule_dim, output_capsule_dim, num_iterations``, by name,
      called with ``u``. ``weight [I, J, K, D]``, with these sizes, starts as ``0.1 * torch.randn``.
    * ``n_in, n_out, in_dim, out_dim, n_iters``, by name, called with ``u``. ``W [n_in, n_out, out_dim, in_dim]`` starts
      as ``0.01 * torch.randn``. The result is ``(v, c [B, n_in, n_out])``.

    Shapes: ``[B, I, K]`` to ``v [B, J, D]``, in the dtype of the input.

    Raises:
        ValueError, TypeError: sizes below 1, arguments of none of the layers, inputs that do not fit.
    """

    _layouts = (
        Layout("in_capsules", "out_capsules", "in_dim", "out_dim", "W", ("1", *IJDK), std=1.0, inputs=("x",)),
        Layout(inputs=("u_hat", "batch_size"), votes=True),
        Layout(
            "num_input_capsules",
            "num_output_capsules",
            "input_capsule_dim",
            "output_capsule_dim",
            "weight",
            IJKD,
            std=0.1,
        ),
        Layout("n_in", "n_out", "in_dim", "out_dim", "W", IJDK),
    )

    @overload
    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        in_dim: int,
        out_dim: int,
        num_iterations: int = 3,
        *,
        eps: float = 1e-8,
    ) -> None: ...
    @overload
    def __init__(self, num_iterations: FewSums = 3, *, eps: float = 1e-8) -> None: ...
    @overload
    def __init__(
        self,
        num_input_capsules: int,
        num_output_capsules: int,
        input_capsule_dim: int,
        output_capsule_dim: int,
        num_iterations: int = 3,
        *,
        eps: float = 1e-8,
    ) -> None: ...
    @overload
    def __init__(
        self, n_in: int, n_out: int, in_dim: int, out_dim: int, n_iters: int = 3, *, eps: float = 1e-8
    ) -> None: ...
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._take(args, kwargs)
        if self._layout.weight:
            self._make_weight()
            return
        checks.integer(self._op, "num_iterations", self.num_iterations)
        if self.num_iterations > kinds.MOST:
            raise ValueError(
                f"{self._op}: num_iterations must be at most {kinds.MOST}, got {self.num_iterations}; if that is a "
                f"size, give all of {self._forms[0].published()}; more iterations: "
                f"capsfast.nn.RoutingByAgreement(num_iterations={self.num_iterations})"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        u, *more = self._inputs(args, kwargs)
        if self._layout.votes:
            _arguments.floats(self._op, "u_hat", u, "[B, I, J, D]")
            _arguments.batch_size(self._op, more[0] if more else None, u)
            return route_votes(u, self.num_iterations, eps=self.eps)
        self._check_capsules(self._layout.inputs[0], u)
        pair = self._layout.I == "n_in"
        sums = self.n_iters if pair else self.num_iterations
        return dynamic_routing(u, self._weight_ijdk(), sums, eps=self.eps, return_coupling=pair)


class DynamicRoutingLayer(PublishedLayer):
    """Dynamic routing (Sabour, Frosst, Hinton 2017) whose gradient goes through the last iteration only.

    ``W [in_capsules, out_capsules, out_dim, in_dim]`` starts as ``0.1 * torch.randn``. With ``share_weights`` all input
    capsules share a matrix: the first axis has length 1. The layer forms ``num_iterations`` weighted sums.

    Shapes: ``u [B, in_capsules, in_dim]`` to ``[B, out_capsules, out_dim]``, in the dtype of u.

    Raises:
        ValueError, TypeError: sizes below 1, inputs that do not fit.
    """

    _layout = Layout(
        "in_capsules", "out_capsules", "in_dim", "out_dim", "W", IJDK, shared=("1", "J", "D", "K"), std=0.1
    )

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        in_dim: int,
        out_dim: int,
        num_iterations: int = 3,
        share_weights: bool = False,
        *,
        eps: float = 1e-8,
    ) -> None:
        super().__init__()
        self.in_capsules, self.out_capsules, self.in_dim, self.out_dim = in_capsules, out_capsules, in_dim, out_dim
        self.num_iterations, self.share_weights, self.eps = num_iterations, share_weights, eps
        self._make_weight(share_weights)

    def forward(self, u: Tensor) -> Tensor:
        self._check_capsules("u", u)
        return dynamic_routing(u, self._weight_ijdk(), self.num_iterations, gradient="last", eps=self.eps)


class DigitCaps(SharedName):
    """Dynamic routing (Sabour, Frosst, Hinton 2017, procedure 1). Three layers have this name:

    * ``num_lower, num_higher, lower_dim, higher_dim, num_routing``, called with ``u``, with ``W [num_lower, num_higher,
      higher_dim, lower_dim]``.
    * ``in_dim, in_caps, num_caps, dim_caps, num_routing``, called with ``x``, with ``W [1, num_caps, in_caps, dim_caps,
      in_dim]``. Its gradient goes through the last iteration only, and eps is added to the norm.
    * ``in_capsules, in_dim, num_capsules, capsule_dim``, called with ``x``, with ``W [1, in_capsules, num_capsules,
      capsule_dim, in_dim]``. Two iterations, and eps is added to the norm.

    By position the sizes are ambiguous, which is an error. ``W`` starts as ``0.01 * torch.randn``.

    Shapes: ``[B, I, K]`` to ``[B, J, D]``, in the dtype of the input.

    Raises:
        ValueError, TypeError: sizes below 1, arguments of none of the layers, inputs that do not fit.
    """

    _layouts = (
        Layout("num_lower", "num_higher", "lower_dim", "higher_dim", "W", IJDK),
        Layout("in_caps", "num_caps", "in_dim", "dim_caps", "W", ("1", *JIDK), inputs=("x",)),
        Layout("in_capsules", "num_capsules", "in_dim", "capsule_dim", "W", ("1", *IJDK), inputs=("x",)),
    )

    @overload
    def __init__(
        self,
        num_lower: int,
        num_higher: int,
        lower_dim: int,
        higher_dim: int,
        num_routing: int = 3,
        *,
        eps: float = 1e-8,
    ) -> None: ...
    @overload
    def __init__(
        self, in_dim: int, in_caps: int, num_caps: int, dim_caps: int, num_routing: int, *, eps: float = 1e-8
    ) -> None: ...
    @overload
    def __init__(
        self, in_capsules: int, in_dim: int, num_capsules: int, capsule_dim: int, *, eps: float = 1e-8
    ) -> None: ...
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._take(args, kwargs)
        self._make_weight()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (u,) = self._inputs(args, kwargs)
        self._check_capsules(self._layout.inputs[0], u)
        return dynamic_routing(
            u,
            self._weight_ijdk(),
            2 if self._layout.I == "in_capsules" else self.num_routing,
            gradient="last" if self._layout.I == "in_caps" else "full",
            squash="paper" if self._layout.I == "num_lower" else "eps_outside",
            eps=self.eps,
        )


class DigitCapsules(PublishedLayer):
    """Dynamic routing (Sabour, Frosst, Hinton 2017, procedure 1) with eps added to the norm.

    ``W [1, num_caps_in, num_caps_out, dim_caps_out, dim_caps_in]`` starts as ``0.01 * torch.randn``. The layer forms
    ``routing_iters`` weighted sums.

    Shapes: ``x [B, num_caps_in, dim_caps_in]`` to ``[B, num_caps_out, dim_caps_out]``, in the dtype of x.

    Raises:
        ValueError, TypeError: sizes below 1, inputs that do not fit.
    """

    _layout = Layout("num_caps_in", "num_caps_out", "dim_caps_in", "dim_caps_out", "W", ("1", *IJDK))

    def __init__(
        self,
        num_caps_in: int,
        dim_caps_in: int,
        num_caps_out: int,
        dim_caps_out: int,
        routing_iters: int = 3,
        *,
        eps: float = 1e-8,
    ) -> None:
        super().__init__()
        self.num_caps_in, self.dim_caps_in, self.num_caps_out = num_caps_in, dim_caps_in, num_caps_out
        self.dim_caps_out, self.routing_iters, self.eps = dim_caps_out, routing_iters, eps
        self._make_weight()

    def forward(self, x: Tensor) -> Tensor:
        self._check_capsules("x", x)
        return dynamic_routing(x, self._weight_ijdk(), self.routing_iters, squash="eps_outside", eps=self.eps)


class Router(PublishedLayer):
    """Dynamic routing (Sabour, Frosst, Hinton 2017) with a softmax over the input capsules.

    ``weight [in_caps, out_caps, in_d, out_d]`` starts as ``torch.randn``. The layer forms ``iterations`` weighted sums.

    Shapes: ``u [B, in_caps, in_d]`` to ``[B, out_caps, out_d]``, in the dtype of u.

    Raises:
        ValueError, TypeError: sizes below 1, inputs that do not fit.
    """

    _layout = Layout("in_caps", "out_caps", "in_d", "out_d", "weight", IJKD, std=1.0)

    def __init__(
        self, in_caps: int, out_caps: int, in_d: int, out_d: int, iterations: int, *, eps: float = 1e-8
    ) -> None:
        super().__init__()
        self.in_caps, self.out_caps, self.in_d, self.out_d = in_caps, out_caps, in_d, out_d
        self.iterations, self.eps = iterations, eps
        self._make_weight()

    def forward(self, u: Tensor) -> Tensor:
        self._check_capsules("u", u)
        return dynamic_routing(u, self._weight_ijdk(), self.iterations, softmax="in", eps=self.eps)


class CapsuleLayer(PublishedLayer):
    """Dynamic routing with a softmax over the input capsules; with ``num_route_nodes=-1`` primary capsules.

    ``route_weights [num_capsules, num_route_nodes, in_channels, out_channels]`` starts as ``torch.randn``. The
    layer forms ``num_iterations`` weighted sums. Primary capsules are ``num_capsules`` convolutions with
    ``kernel_size`` and ``stride``, one per component of a capsule.

    Shapes: ``x [B, num_route_nodes, in_channels]`` to ``[num_capsules, B, 1, 1, out_channels]``; primary capsules:
    ``x [B, in_channels, H, W]`` to ``[B, out_channels·H'·W', num_capsules]``. The dtype is that of x.

    Raises:
        ValueError, TypeError: sizes below 1, inputs that do not fit.
    """

    _layout = Layout("num_route_nodes", "num_capsules", "in_channels", "out_channels", "route_weights", JIKD, std=1.0)

    def __init__(
        self,
        num_capsules: int,
        num_route_nodes: int | Literal[-1],
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] | None = None,
        stride: int | tuple[int, int] | None = None,
        num_iterations: int = 3,
        *,
        eps: float = NO_EPS,
    ) -> None:
        super().__init__()
        self.num_capsules, self.num_route_nodes, self.in_channels = num_capsules, num_route_nodes, in_channels
        self.out_channels, self.kernel_size, self.stride = out_channels, kernel_size, stride
        self.num_iterations, self.eps = num_iterations, eps
        if not isinstance(num_route_nodes, int) or num_route_nodes != -1:
            checks.integer(self._op, "num_route_nodes", num_route_nodes)
            self._make_weight()
            return
        if kernel_size is None or stride is None:
            raise ValueError(
                f"{self._op}: num_route_nodes=-1 makes convolutions and needs kernel_size and stride, got "
                f"{checks.shown(kernel_size)} and {checks.shown(stride)}"
            )
        self.capsules = nn.ModuleList(
            nn.Conv2d(in_channels, out_channels, kernel_size, stride) for _ in range(num_capsules)
        )

    def _initialise(self) -> None:
        if self.num_route_nodes != -1:
            super()._initialise()

    def forward(self, x: Tensor) -> Tensor:
        if self.num_route_nodes == -1:
            return squash(torch.stack([conv(x).flatten(1) for conv in self.capsules], dim=-1), eps=self.eps)
        self._check_capsules("x", x)
        v = dynamic_routing(x, self._weight_ijdk(), self.num_iterations, softmax="in", eps=self.eps)
        return v.transpose(0, 1)[:, :, None, None]


class DenseCapsule(PublishedLayer):
    """Dynamic routing whose gradient goes through the last iteration only, with eps added to the norm.

    ``weight [out_num_caps, in_num_caps, out_dim_caps, in_dim_caps]`` starts as ``0.01 * torch.randn``. The layer forms
    ``routings`` weighted sums.

    Shapes: ``x [B, in_num_caps, in_dim_caps]`` to ``[B, out_num_caps, out_dim_caps]``, in the dtype of x.

    Raises:
        ValueError, TypeError: sizes below 1, inputs that do not fit.
    """

    _layout = Layout("in_num_caps", "out_num_caps", "in_dim_caps", "out_dim_caps", "weight", JIDK)

    def __init__(
        self,
        in_num_caps: int,
        in_dim_caps: int,
        out_num_caps: int,
        out_dim_caps: int,
        routings: int = 3,
        *,
        eps: float = 1e-8,
    ) -> None:
        super().__init__()
        self.in_num_caps, self.in_dim_caps, self.out_num_caps = in_num_caps, in_dim_caps, out_num_caps
        self.out_dim_caps, self.routings, self.eps = out_dim_caps, routings, eps
        self._make_weight()

    def forward(self, x: Tensor) -> Tensor:
        self._check_capsules("x", x)
        return dynamic_routing(
            x, self._weight_ijdk(), self.routings, gradient="last", squash="eps_outside", eps=self.eps
        )


class AgreementRouting(PublishedLayer):
    """Dynamic routing of votes with learned logits. ``n_iterations`` weighted sums follow the first one.

    ``b [input_caps, output_caps]`` starts at 0.

    Shapes: ``u_predict [B, input_caps, output_caps, D]`` to ``[B, output_caps, D]``, in the dtype of u_predict.

    Raises:
        ValueError, TypeError: sizes below 1, inputs that do not fit.
    """

    b: nn.Parameter
    _layout = Layout("input_caps", "output_caps", weight="b", axes=("I", "J"), votes=True)

    def __init__(self, input_caps: int, output_caps: int, n_iterations: MoreSums, *, eps: float = NO_EPS) -> None:
        super().__init__()
        checks.integer(self._op, "n_iterations", n_iterations, least=0)
        self.input_caps, self.output_caps, self.n_iterations, self.eps = input_caps, output_caps, n_iterations, eps
        self._make_weight()

    def _initialise(self) -> None:
        nn.init.zeros_(self.b)

    def forward(self, u_predict: Tensor) -> Tensor:
        _arguments.floats(self._op, "u_predict", u_predict, "[B, I, J, D]")
        return route_votes(u_predict, self.n_iterations + 1, logits=self.b, eps=self.eps)


class CapsLayer(PublishedLayer):
    """Makes votes ``[B, input_caps, output_caps, output_dim]``, which ``routing_module`` routes.

    If the module is this package's :class:`AgreementRouting`, without hooks and with its own forward, the votes are not
    stored. ``weights [input_caps, input_dim, output_caps * output_dim]`` starts uniform between plus and minus
    ``1 / sqrt(input_caps)``.

    Shapes: ``caps_output [B, input_caps, input_dim]`` to ``[B, output_caps, output_dim]``, in the dtype of caps_output.

    Raises:
        ValueError, TypeError: sizes below 1, a module for other sizes, inputs that do not fit.
    """

    weights: nn.Parameter
    routing_module: nn.Module
    _layout = Layout("input_caps", "output_caps", "input_dim", "output_dim", "weights", ("I", "K", "JD"))

    def __init__(
        self, input_caps: int, input_dim: int, output_caps: int, output_dim: int, routing_module: nn.Module
    ) -> None:
        super().__init__()
        if not isinstance(routing_module, nn.Module):
            raise TypeError(f"{self._op}: routing_module must be a module, got {type(routing_module).__name__}")
        if isinstance(routing_module, AgreementRouting):
            theirs = (routing_module.input_caps, routing_module.output_caps)
            if theirs != (input_caps, output_caps):
                raise ValueError(
                    f"{self._op}: routing_module must be for input_caps={input_caps} and output_caps={output_caps}, "
                    f"got one for {theirs[0]} and {theirs[1]}"
                )
        self.input_caps, self.input_dim, self.output_caps = input_caps, input_dim, output_caps
        self.output_dim, self.routing_module = output_dim, routing_module
        self._make_weight()

    def _initialise(self) -> None:
        bound = 1 / math.sqrt(self.input_caps)
        nn.init.uniform_(self.weights, -bound, bound)

    def forward(self, caps_output: Tensor) -> Tensor:
        self._check_capsules("caps_output", caps_output)
        weight = self.weights.unflatten(2, (self.output_caps, self.output_dim)).permute(0, 2, 3, 1)
        routing = self.routing_module
        if type(routing) is AgreementRouting and "forward" not in vars(routing) and not hooked(routing):
            return dynamic_routing(caps_output, weight, routing.n_iterations + 1, logits=routing.b, eps=routing.eps)
        return routing(torch.einsum("ijdk,bik->bijd", weight, caps_output))  # type: ignore[no-any-return]


class CapsuleLinear(SharedName):
    """Dynamic routing or k-means (Ren, Lu 2018). Two layers have this name:

    * The first returns ``(v, c [B, J, I])``.
    * The second, meant by ``bias`` or ``return_prob``, adds ``bias [J, D]``, which starts at 0, to the weighted sums
      unless ``bias=False``, squashes by default, and returns v alone unless ``return_prob=True``.

    ``routing_type="k_means"`` scores votes by dot products with the normalised capsules, starting from equal coupling;
    there is no other similarity. ``squash`` is for the result: dynamic routing squashes before its last iteration.
    ``weight [out_capsules, in_capsules, out_length, in_length]`` starts as ``xavier_uniform_``; with ``share_weight``
    it has no axis of input capsules. The layer forms ``num_iterations`` weighted sums.

    Shapes: ``input [B, I, in_length]`` to ``v [B, out_capsules, out_length]``, in the dtype of the input.

    Raises:
        ValueError, TypeError: sizes below 1, arguments of neither layer, inputs that do not fit.
    """

    _layout = Layout("in_capsules", "out_capsules", "in_length", "out_length", "weight", JIDK, shared=("J", "D", "K"))
    _layouts = (_layout, _layout)

    @overload
    def __init__(
        self,
        out_capsules: int,
        in_length: int,
        out_length: int,
        in_capsules: int | None = None,
        share_weight: bool = True,
        routing_type: Literal["dynamic", "k_means"] = "k_means",
        num_iterations: int = 3,
        squash: bool = False,
        *,
        similarity: Literal["dot"] = "dot",
        eps: float = NO_EPS,
    ) -> None: ...
    @overload
    def __init__(
        self,
        out_capsules: int,
        in_length: int,
        out_length: int,
        in_capsules: int | None = None,
        share_weight: bool = True,
        routing_type: Literal["dynamic", "k_means"] = "k_means",
        num_iterations: int = 3,
        bias: bool = True,
        squash: bool = True,
        *,
        return_prob: bool = False,
        similarity: Literal["dot"] = "dot",
        eps: float = NO_EPS,
    ) -> None: ...
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._take(args, kwargs)
        self._of_matrices = "return_prob" in vars(self)  # the second layer draws a matrix for each input capsule
        self._pair: bool = getattr(self, "return_prob", True)
        if not self.share_weight:
            checks.integer(self._op, "in_capsules", self.in_capsules)
        elif self.in_capsules is not None:
            raise ValueError(
                f"{self._op}: share_weight=True is for any number of input capsules, got "
                f"in_capsules={checks.shown(self.in_capsules)}"
            )
        self.weight = self._empty(self._layout.shared if self.share_weight else self._layout.axes)
        self.bias = self._empty(("J", "D")) if getattr(self, "bias", False) else None
        self._initialise()

    def _initialise(self) -> None:
        if self._of_matrices:
            J, D, K = self.weight.shape[0], *self.weight.shape[-2:]
            # uniform_() because the published layer, too, draws numbers that it then replaces.
            drawn = self.weight.new_empty(self.weight.numel() // (J * D * K), K, J * D).uniform_()
            drawn = nn.init.xavier_uniform_(drawn).unflatten(2, (J, D)).permute(2, 0, 3, 1)
            with torch.no_grad():
                self.weight.copy_(drawn[:, 0] if self.share_weight else drawn)
        else:
            nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.share_weight:
            _arguments.floats(self._op, "input", input, "[B, I, K]")
            weight = self.weight[None]
        else:
            self._check_capsules("input", input)
            weight = self.weight.transpose(0, 1)
        if self.routing_type == "k_means":
            v, coupling = self._k_means(input, weight)
            return (v, coupling.transpose(1, 2)) if self._pair else v
        routed = dynamic_routing(
            input,
            weight,
            self.num_iterations,
            bias=self.bias,
            squash_last=self.squash,
            eps=self.eps,
            return_coupling=self._pair,
        )
        return routed if isinstance(routed, Tensor) else (routed[0], routed[1].transpose(1, 2))

    def _k_means(self, u: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        center = routing_pass(u, weight).first
        for _ in range(self.num_iterations):
            moments = routing_pass(u, weight, query=F.normalize(center, dim=-1), return_weights=True)
            center = moments.first if self.bias is None else moments.first + self.bias
        assert moments.weights is not None
        return (squash(center, eps=self.eps) if self.squash else center).to(u.dtype), moments.weights
