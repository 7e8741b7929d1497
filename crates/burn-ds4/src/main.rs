//! The program: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    burn_ds4::main()
}
