//! Fuzz targets of what comes in files and from the model: each takes bytes, and fails only by a
//! panic. The crate in `fuzz/` gives them to libFuzzer; here they run on their corpus and on some
//! made-up inputs, as docs/testing.md says.

pub mod files;

/// A test of each target, on so many inputs.
#[cfg(test)]
macro_rules! driven {
    ($($name:ident: $target:path, $cases:literal);* $(;)?) => {
        $(
            #[test]
            fn $name() {
                ds4_fuzz_driver::drive(stringify!($name), $cases, $target);
            }
        )*
    };
}

#[cfg(test)]
driven! {
    config: files::config, 2000;
    generation_config: files::generation_config, 1000;
    header: files::header, 500;
    index: files::index, 500;
    tokenizer: files::tokenizer, 150;
}
