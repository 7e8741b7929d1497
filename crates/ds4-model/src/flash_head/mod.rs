//! A clustered head in place of a model's output matrix, and in a file next to the checkpoint that
//! it was made of.
//!
//! A [`ProbedHead`] chooses tokens. In [`Model::flash_head`](crate::model::Model::flash_head) it
//! chooses the text, which may then have other tokens than the output matrix would choose. In
//! [`MtpLayer::flash_head`](crate::mtp::MtpLayer::flash_head) it only chooses drafts, and the text
//! is the same.
//!
//! Building the clusters takes minutes for a large vocabulary, so they can be saved. The rows
//! themselves stay in the checkpoint. The file has the cluster of each row, the centroids and their
//! norms, and a fingerprint of the matrix that it belongs to.

mod error;
mod file;
mod fingerprint;
mod keys;
mod reader;
#[cfg(all(test, feature = "flex"))]
mod tests;
mod writer;

pub use crate::probed_head::{DEFAULT_CAPACITY, ProbedHead};
pub use error::FlashHeadFileError;
pub use file::{FLASH_HEAD_FILE, FlashHeadFile};
