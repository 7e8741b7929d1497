//! Memory that operators keep on devices between launches.

/// Drops the scratch memory that kernels of the current thread keep on devices between launches.
/// They create it again.
///
/// Call this after a recording of device work has failed, because nothing that the work would have
/// written can be relied on. Recordings made before must not be replayed any more.
pub fn forget() {
    #[cfg(feature = "cube")]
    crate::arrival::forget();
    crate::collective::forget();
}
