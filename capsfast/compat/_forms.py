"""Layers of one name in several forms, which their arguments tell apart."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..nn._called import Called
from ..nn._layer import check_call

Choice = Callable[[tuple[Any, ...], dict[str, Any]], type["Forms"]]


class Forms(Called):
    """A class derived from this one is the name; the classes derived from that in its module are the forms.

    _form_of: the form that arguments are of.
    """

    _form_of: Choice
    _form: type["Forms"]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = cls._form_of(args, kwargs) if Forms in cls.__bases__ else cls
        return super().__new__(made, *args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Of a subclass, in the form that its arguments say."""
        form = type(self)._form_of(args, kwargs)
        check_call(form, args, kwargs)
        form.__init__(self, *args, **kwargs)
        self._form = form

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        return self._form.forward(self, *inputs, **named)

    def _get_name(self) -> str:
        named = next(each for each in type(self).__mro__ if Forms in each.__bases__)
        return named.__name__ if type(self).__module__ == named.__module__ else type(self).__name__
