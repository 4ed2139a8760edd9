//! The rows that are measured.

use std::time::Duration;

use tidegate_core::Direction;

use crate::experiments::requests::{App, GBIT, MBIT, Row};

/// The rows that the tables of the project are about.
const QUICK: [&str; 19] = [
    "redis-1b-50m",
    "redis-200m",
    "nginx-keep-1k-200m",
    "nginx-keep-10k-200m",
    "nginx-close-10k-200m",
    "nginx-close-10k-1g",
    "nginx-close-1k-5c-1b-50m",
    "h3-10k-50m",
    "h3-10k-open-50m",
    "nginx-keep-1k-ingress-200m",
    "nginx-keep-10k-ingress-200m",
    "nginx-close-10k-ingress-200m",
    "nginx-close-10k-100m-1ms",
    "nginx-keep-10k-100m-1ms",
    "nginx-keep-1k-100m-1ms",
    "nginx-close-10k-100m-20ms",
    "nginx-keep-10k-100m-20ms",
    "nginx-keep-1k-100m-20ms",
    "nginx-keep-10k-100m-100ms",
];

/// The rows of the short or of the whole form, those of one path after each other.
pub(super) fn plan(quick: bool) -> Vec<Row> {
    if quick {
        return QUICK.iter().filter_map(|name| name.parse().ok()).collect();
    }
    let apps: [App; 13] = [
        App::NginxClose(1),
        App::NginxClose(10),
        App::NginxClose(100),
        App::NginxKeep(1),
        App::NginxKeep(10),
        App::NginxKeep(100),
        App::Http3(1),
        App::Http3(10),
        App::Http3(100),
        App::Redis,
        App::Pgbench,
        App::Dns,
        App::Trickle,
    ];
    let few = [App::NginxClose(10), App::NginxKeep(1), App::NginxKeep(10), App::Redis];
    let mut rows: Vec<Row> = plan(true);
    for direction in [Direction::Egress, Direction::Ingress] {
        let row = |app, limit_bit_s| Row { direction, ..Row::new(app, limit_bit_s) };
        for limit_bit_s in [20 * MBIT, 50 * MBIT, 200 * MBIT, GBIT, 5 * GBIT] {
            rows.extend(apps.map(|app| row(app, limit_bit_s)));
        }
        let usual = |app| row(app, 200 * MBIT);
        for bulk in [0, 1, 100] {
            rows.extend(few.map(|app| Row { bulk, ..usual(app) }));
        }
        for clients in [1, 5, 100, 500] {
            rows.extend(few.map(|app| Row { clients, ..usual(app) }));
        }
        rows.extend(few.map(|app| Row { cc: "bbr", ..usual(app) }));
        rows.extend(few.map(|app| Row { open: true, ..usual(app) }));
        for ms in [1, 20, 100] {
            let rtt = Some(Duration::from_millis(ms));
            rows.extend(few.map(|app| Row { rtt, ..row(app, 100 * MBIT) }));
        }
    }
    let mut kept: Vec<Row> = Vec::new();
    for row in rows {
        if !kept.contains(&row) {
            kept.push(row);
        }
    }
    kept.sort_by_key(|row| row.rtt);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for row in plan(false) {
            assert_eq!(row.to_string().parse::<Row>(), Ok(row));
        }
        assert_eq!(plan(true).len(), QUICK.len());
        let names: Vec<String> = plan(true).iter().map(Row::to_string).collect();
        assert_eq!(names, QUICK);
    }

    #[test]
    fn the_whole_plan_has_every_axis() {
        let plan = plan(false);
        for limit in [20 * MBIT, 50 * MBIT, 200 * MBIT, GBIT, 5 * GBIT] {
            assert!(plan.iter().any(|row| row.limit_bit_s == limit));
        }
        for bulk in [0, 1, 4, 100] {
            assert!(plan.iter().any(|row| row.bulk == bulk));
        }
        for ms in [1, 20, 100] {
            assert!(plan.iter().any(|row| row.rtt == Some(Duration::from_millis(ms))));
        }
        assert!(plan.iter().any(|row| row.clients == 500));
        assert!(plan.windows(2).all(|pair| pair[0].rtt <= pair[1].rtt), "a path is made once");
    }
}
