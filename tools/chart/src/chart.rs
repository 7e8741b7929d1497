//! Pairs measurements with peers and arranges them in panels and lines.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Location};
use crate::input::{Located, Measurement, Peer, Shape};

/// The most combinations of the columns beside the x axis that have a panel each. With more, one
/// column becomes lines.
const PANELS_PER_VARIANT: usize = 4;

/// One point of the chart and one row of the table.
#[derive(Clone, Debug)]
pub struct Case {
    /// The sizes.
    pub shape: Shape,
    /// Our time in microseconds, if it was taken.
    pub ours: Option<f64>,
    /// Our bandwidth as a share of a plain copy's.
    pub share_of_copy: Option<f64>,
    /// The best existing kernel, if one is known.
    pub peer: Option<Peer>,
}

impl Case {
    /// The least time the memory needs, if it is known.
    pub fn floor(&self) -> Option<f64> {
        self.peer.as_ref().and_then(|peer| peer.floor_us)
    }

    /// Our time divided by the peer's.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.ours? / self.peer.as_ref()?.us)
    }
}

/// The cases that differ only in the column of the x axis.
#[derive(Clone, Debug)]
pub struct Line {
    /// The value of [`Chart::line_column`].
    pub value: Option<u64>,
    /// The points by x.
    pub points: Vec<(u64, Case)>,
}

/// One coordinate system.
#[derive(Clone, Debug)]
pub struct Panel {
    /// The variant shown.
    pub variant: String,
    /// The values that distinguish this panel from the others; empty for a single one.
    pub title: String,
    /// The lines, by value.
    pub lines: Vec<Line>,
}

impl Panel {
    /// All cases, line by line.
    pub fn cases(&self) -> impl Iterator<Item = &Case> {
        let points = self.lines.iter().flat_map(|line| &line.points);
        points.map(|(_, case)| case)
    }
}

/// A chart of one operator.
#[derive(Clone, Debug)]
pub struct Chart {
    /// The operator.
    pub op: String,
    /// The element type.
    pub dtype: String,
    /// The code generator.
    pub codegen: Option<String>,
    /// The shape's column on the x axis.
    pub x_column: String,
    /// The column that distinguishes the lines of a panel, if panels have several.
    pub line_column: Option<String>,
    /// The panels: variants in the order of the measurements, sizes ascending.
    pub panels: Vec<Panel>,
}

impl Chart {
    /// Arranges `measurements` of one operator next to the `peers` that have the same variant and
    /// shape.
    ///
    /// The column with the most values becomes the x axis; of equals, the one that spans the larger
    /// ratio. Every combination of the other columns has a panel. If there are too many
    /// combinations, the column with the most values among them becomes lines; of equals, the one
    /// that spans the smaller ratio, whose lines are closest.
    ///
    /// # Errors
    /// No measurements, shapes with different columns, or two measurements or two peers for one
    /// case.
    pub fn new(measurements: &Located<Measurement>, peers: &Located<Peer>) -> Result<Self, Error> {
        let Some((_, first)) = measurements.first() else {
            return Err(Error::NoTimes);
        };
        check_columns(measurements)?;
        check_unique(measurements, |m| (&m.op, &m.variant, &m.shape))?;
        check_unique(peers, |p| (&p.op, &p.variant, &p.shape))?;

        let axes = Axes::new(measurements);
        let mut variants: Vec<&str> = Vec::new();
        let mut panels: BTreeMap<_, BTreeMap<_, BTreeMap<_, _>>> = BTreeMap::new();
        for (_, m) in measurements {
            let variant = variants.iter().position(|v| *v == m.variant);
            let variant = variant.unwrap_or_else(|| {
                variants.push(&m.variant);
                variants.len() - 1
            });
            let values =
                |names: &[String]| names.iter().filter_map(|name| m.shape.get(name)).collect();
            let sizes: Vec<u64> = values(&axes.panels);
            let line = axes.line.as_deref().and_then(|name| m.shape.get(name));
            let x = m.shape.get(&axes.x).unwrap_or_default();
            let lines = panels.entry((variant, sizes)).or_default();
            lines.entry(line).or_default().insert(x, case(m, peers));
        }
        let panels = panels.into_iter().map(|((variant, sizes), lines)| {
            let variant = variants[variant].to_string();
            let sizes = axes.panels.iter().zip(sizes);
            let mut title: Vec<_> = sizes
                .map(|(name, size)| format!("{name} = {size}"))
                .collect();
            if variants.len() > 1 {
                title.insert(0, variant.clone());
            }
            let lines = lines.into_iter().map(|(value, points)| Line {
                value,
                points: points.into_iter().collect(),
            });
            Panel {
                variant,
                title: title.join(", "),
                lines: lines.collect(),
            }
        });
        Ok(Self {
            op: first.op.clone(),
            dtype: first.dtype.clone(),
            codegen: first.codegen.clone(),
            panels: panels.collect(),
            x_column: axes.x,
            line_column: axes.line,
        })
    }

    /// The values that lines have in any panel, ascending.
    pub fn line_values(&self) -> Vec<u64> {
        let lines = self.panels.iter().flat_map(|panel| &panel.lines);
        let values: BTreeSet<u64> = lines.filter_map(|line| line.value).collect();
        values.into_iter().collect()
    }
}

fn case(m: &Measurement, peers: &Located<Peer>) -> Case {
    let same = |p: &&Peer| p.op == m.op && p.variant == m.variant && p.shape == m.shape;
    Case {
        shape: m.shape.clone(),
        ours: m.us,
        share_of_copy: m.share_of_copy,
        peer: peers.iter().map(|(_, peer)| peer).find(same).cloned(),
    }
}

fn check_columns(measurements: &Located<Measurement>) -> Result<(), Error> {
    let names = |shape: &Shape| -> Vec<String> {
        shape
            .sorted()
            .iter()
            .map(|(name, _)| name.to_string())
            .collect()
    };
    let expected = names(&measurements[0].1.shape);
    for (location, m) in measurements {
        let found = names(&m.shape);
        if found != expected {
            return Err(Error::Malformed {
                location: location.clone(),
                problem: format!(
                    "the shape has columns {}, others have {}",
                    found.join(" "),
                    expected.join(" ")
                ),
            });
        }
    }
    Ok(())
}

fn check_unique<T>(
    records: &Located<T>,
    key: impl Fn(&T) -> (&String, &String, &Shape),
) -> Result<(), Error> {
    let mut seen: BTreeMap<_, &Location> = BTreeMap::new();
    for (location, record) in records {
        let (op, variant, shape) = key(record);
        if let Some(first) = seen.insert((op, variant, shape.sorted()), location) {
            return Err(Error::Duplicate {
                first: first.clone(),
                second: location.clone(),
            });
        }
    }
    Ok(())
}

/// The role of each column.
struct Axes {
    x: String,
    line: Option<String>,
    panels: Vec<String>,
}

impl Axes {
    fn new(measurements: &Located<Measurement>) -> Self {
        let shapes: Vec<&Shape> = measurements.iter().map(|(_, m)| &m.shape).collect();
        let columns: Vec<Column> = shapes[0]
            .columns()
            .iter()
            .map(|(name, _)| Column::new(name, &shapes))
            .collect();

        let mut x = &columns[0];
        for column in &columns[1..] {
            if (column.distinct(), column.ratio()) > (x.distinct(), x.ratio()) {
                x = column;
            }
        }
        // A column that varies with the x axis adds no information, and would break its lines into
        // single points.
        let mut rest: Vec<&Column> = columns
            .iter()
            .filter(|c| c.distinct() > 1 && !c.goes_with(x))
            .collect();

        let combinations: BTreeSet<Vec<u64>> = (0..shapes.len())
            .map(|row| rest.iter().map(|column| column.values[row]).collect())
            .collect();
        let mut line: Option<&Column> = None;
        if combinations.len() > PANELS_PER_VARIANT {
            for &column in &rest {
                let better = |best: &Column| {
                    column.distinct() > best.distinct()
                        || (column.distinct() == best.distinct() && column.ratio() < best.ratio())
                };
                if line.is_none_or(better) {
                    line = Some(column);
                }
            }
            rest.retain(|column| line.is_none_or(|line| !column.goes_with(line)));
        }
        Self {
            x: x.name.clone(),
            line: line.map(|column| column.name.clone()),
            panels: rest.iter().map(|column| column.name.clone()).collect(),
        }
    }
}

/// One column of all shapes.
struct Column {
    name: String,
    values: Vec<u64>,
}

impl Column {
    fn new(name: &str, shapes: &[&Shape]) -> Self {
        Self {
            name: name.to_string(),
            values: shapes.iter().filter_map(|shape| shape.get(name)).collect(),
        }
    }

    fn distinct(&self) -> usize {
        self.values.iter().collect::<BTreeSet<_>>().len()
    }

    fn ratio(&self) -> f64 {
        let largest = self.values.iter().max().copied().unwrap_or(1);
        let smallest = self.values.iter().min().copied().unwrap_or(1);
        largest as f64 / smallest as f64
    }

    /// Whether each value of one determines that of the other.
    fn goes_with(&self, other: &Column) -> bool {
        let pairs: BTreeSet<_> = self.values.iter().zip(&other.values).collect();
        pairs.len() == self.distinct() && pairs.len() == other.distinct()
    }
}
