//! Which layers of a model live on which device.
//!
//! The layers are divided into contiguous runs, one for each device. The embedding is with the
//! first run, the head and what drafts with the last. Only the residual streams go from one device
//! to the next. The cache of a layer is where the layer is.
//!
//! [`Devices`] says which devices there are, and a [`Plan`] how many layers each has: as many as
//! balance the bytes of weights and caches. Both become a [`Placement`].

mod bytes;
mod devices;
mod error;
mod plan;
mod runs;
mod share;
mod weight_bytes;

pub(crate) use bytes::Place;
pub use bytes::{ModelBytes, PartBytes};
pub use devices::{DEFAULT_CONTEXT, Devices};
pub use error::PlacementError;
pub use plan::Plan;
pub use runs::{Placement, Run};
pub(crate) use runs::{Portion, name};
pub use share::{Parallel, check};
pub(crate) use share::{Share, check_shared};
pub(crate) use weight_bytes::WeightBytes;
