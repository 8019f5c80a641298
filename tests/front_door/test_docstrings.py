"""Public methods have a docstring, their own or that of the method that they override."""

import importlib
import inspect
import pkgutil

import pycollective

#: Modules of packages that need not be installed.
OPTIONAL = ("mpi4py", "ray", "torch")


def public_classes():
    for found in pkgutil.walk_packages(pycollective.__path__, "pycollective."):
        if found.name.rsplit(".", 1)[1] in ("__main__", "_core", "_nn"):
            continue
        try:
            module = importlib.import_module(found.name)
        except ImportError as error:
            assert error.name in OPTIONAL
            continue
        for name, value in vars(module).items():
            if name[0] != "_" and inspect.isclass(value) and value.__module__ == found.name:
                yield value


def test_public_methods_have_a_docstring_or_inherit_one():
    methods = [
        (cls, name)
        for cls in public_classes()
        for name, value in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod)))
    ]
    assert len(methods) > 1000
    assert not [
        f"{c.__module__}.{c.__name__}.{n}" for c, n in methods if not inspect.getdoc(getattr(c, n))
    ]
