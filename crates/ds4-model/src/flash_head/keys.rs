//! Names in the file of a clustered head.

pub(super) const VERSION_KEY: &str = "flash_head_version";
pub(super) const VERSION: &str = "1";
pub(super) const CAPACITY_KEY: &str = "capacity";
pub(super) const SEED_KEY: &str = "seed";
pub(super) const SPECIAL_KEY: &str = "special_tokens";
pub(super) const FINGERPRINT_KEY: &str = "lm_head";
pub(super) const ASSIGNMENTS: &str = "assignments";
pub(super) const CENTROIDS: &str = "centroids";
pub(super) const NORMS: &str = "norms";
