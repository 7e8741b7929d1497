//! Holds dependencies only: see the manifest.
