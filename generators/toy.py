"""Generators in the plane, for illustration."""

import torch

from dgm_infer import GenerativeModel, StandardNormal

__all__ = ["Hyperbola"]


class Hyperbola(GenerativeModel):
    """``x = u1^2 - u2^2`` of two standard normal inputs: a fibre of two branches (J (78), T (4.51)).

    For ``x != 0`` the fibre is a hyperbola, ``u1`` of one sign on each branch when ``x > 0`` and ``u2`` when
    ``x < 0``. A chain stays on the branch it starts on, unless its sub-steps are so long that a Newton projection lands
    on the other one; output noise, ``WithNoise(Hyperbola(), sd)``, joins the two.

    Latents, each ``[...]``: ``u1``, ``u2``, and ``branch``, the sign (1 or -1) of whichever is larger in magnitude.
    """

    input_density = StandardNormal(2)

    def observed(self, u):
        return (u[..., :1] - u[..., 1:]) * (u[..., :1] + u[..., 1:])

    def latents(self, u):
        u1, u2 = u.unbind(-1)
        larger = torch.where(u1.abs() >= u2.abs(), u1, u2)
        return {"u1": u1, "u2": u2, "branch": torch.where(larger < 0, -1.0, 1.0).to(u)}
