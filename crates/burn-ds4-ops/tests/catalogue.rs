//! How a test gets into the test binary and the benchmark binary at once.

/// Lists the functions that are tests on every device: a `#[test]` for each in the test binary, and
/// `CASES`, which the benchmark binary runs where there is no test harness.
///
/// A function that is left out is dead code, and a family whose `CASES` the catalogue leaves out
/// has a dead constant; neither passes the lint.
macro_rules! catalogue {
    ($($name:ident),* $(,)?) => {
        /// The tests of this family that run on every device.
        pub const CASES: &[(&str, fn())] = &[$((stringify!($name), $name)),*];

        mod on_every_device {
            $(
                #[test]
                fn $name() {
                    super::$name();
                }
            )*
        }
    };
}
