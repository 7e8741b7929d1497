//! The program: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    // SAFETY: no other thread has begun.
    unsafe { burn_ds4::main() }
}
