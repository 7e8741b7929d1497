//! Comma-separated values as ncu writes them: one record a line.

/// The fields of a line; `None` where a quote is not closed.
pub(crate) fn fields(line: &str) -> Option<Vec<String>> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    let mut characters = line.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            // A doubled quote is a quote character and closes nothing.
            '"' if quoted && characters.peek() == Some(&'"') => {
                characters.next();
                push(&mut fields, '"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            other => push(&mut fields, other),
        }
    }
    (!quoted).then_some(fields)
}

fn push(fields: &mut [String], character: char) {
    if let Some(field) = fields.last_mut() {
        field.push(character);
    }
}

#[cfg(test)]
mod tests {
    use super::fields;

    #[test]
    fn fields_may_hold_commas_and_quotes() {
        let read = fields(r#""0","a, ""b""",,"1,234",5"#);
        assert_eq!(read.unwrap(), ["0", r#"a, "b""#, "", "1,234", "5"]);
    }

    #[test]
    fn an_open_quote_is_no_line() {
        assert_eq!(fields(r#""0","a"#), None);
    }
}
