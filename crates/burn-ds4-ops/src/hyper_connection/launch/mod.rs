mod collapse;
mod expand;
mod project;
mod streams;

pub(super) use collapse::{can_collapse, collapse, head};
pub(super) use expand::{can_expand, expand};
