"""Constraints on answers, from the wire and back."""

from __future__ import annotations

from ryzanstein import errors
from ryzanstein.constraints import FIELD, MAX_ALTERNATIVES, Constraint, ConstraintKind
from ryzanstein.v1 import inference_pb2 as inference


def constraint_from_wire(wire: inference.Constraint) -> Constraint:
    """Returns the constraint; `SamplingParams.validate` checks its sizes.

    INVALID_ARGUMENT: of no kind, which may also be one that only a newer version knows.
    """
    kind = wire.WhichOneof("kind")
    match kind:
        case "json_object" if wire.json_object:
            constraint = Constraint.json_object()
        case "choice":
            if len(wire.choice.choices) > MAX_ALTERNATIVES:
                raise errors.invalid(f"{FIELD}.choice", f"must have at most {MAX_ALTERNATIVES} alternatives")
            constraint = Constraint.choice(wire.choice.choices)
        case "json_schema" | "regex" | "grammar":
            constraint = Constraint(ConstraintKind(kind), getattr(wire, kind))
        case _:
            raise errors.invalid(FIELD, f"must be one of {', '.join(each.value for each in ConstraintKind)}")
    return Constraint(constraint.kind, constraint.text, wire.after, wire.lenient)


def constraint_to_wire(constraint: Constraint) -> inference.Constraint:
    wire = inference.Constraint(after=constraint.after, lenient=constraint.lenient)
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            wire.json_object = True
        case ConstraintKind.CHOICE:
            wire.choice.choices.extend(constraint.alternatives)
        case kind:
            setattr(wire, kind.value, constraint.text)
    return wire
