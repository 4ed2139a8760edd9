use super::*;
use crate::report::tests::sample;
use crate::report::{Case, Row};

fn texts(svg: &str) -> Vec<&str> {
    let after = svg.split("<text").skip(1).filter_map(|part| part.split_once('>'));
    after.filter_map(|(_, rest)| Some(rest.split_once('<')?.0.trim())).collect()
}

fn lines() -> Lines {
    Lines {
        title: "Rate on the wire".into(),
        x: "time_s".into(),
        y: "wire_bit_s".into(),
        logarithmic: false,
        limit: Some(1e9),
        series: vec![
            Series::every("htb", 0.1, &[0.9e9, 1.0e9, 0.8e9]),
            Series::every("pace", 0.1, &[0.99e9, 0.99e9, 0.99e9]),
        ],
    }
}

#[test]
fn bars_are_grouped_by_what_varies() {
    let what = BarsOf { title: "Rate", metric: "goodput_bit_s", points: Some("rtt_p50_us") };
    let bars = Bars::from_rows(&sample().rows, what);
    let labels: Vec<_> = bars.groups.iter().map(|group| group.label.join(" ")).collect();
    assert_eq!(labels, ["1 flow", "9 flows"]);
    assert_eq!(bars.groups[1].bars[1].published, Some(945e6));
    assert_eq!(bars.groups[1].bars[0].point, Some(9.0 * 1825.0));
    let svg = Figure::from(bars).svg(&Palette::default()).unwrap();
    for text in ["htb", "nrm", "published", "RTT p50 (right axis)", "goodput (Mbit/s)", "100 µs"] {
        assert!(texts(&svg).contains(&text), "{text}: {:?}", texts(&svg));
    }
}

#[test]
fn bars_without_points_carry_their_figures() {
    let what = BarsOf { title: "Rate", metric: "goodput_bit_s", points: None };
    let svg = Bars::from_rows(&sample().rows, what).svg(&Palette::default()).unwrap();
    assert!(texts(&svg).contains(&"951"));
    assert!(!svg.contains("right axis"));
}

fn rates(rates: &[(&str, u32, f64)]) -> Vec<Row> {
    let row = |&(system, flows, value): &(&str, u32, f64)| Row {
        system: system.into(),
        case: Case::new().with("flows", flows),
        metric: "rate_bit_s".into(),
        run: 1,
        value,
        published: None,
    };
    rates.iter().map(row).collect()
}

#[test]
fn an_unlimited_system_does_not_flatten_the_others() {
    let rows = rates(&[("unlimited", 1, 41.234e9), ("htb", 1, 950e6)]);
    let what = BarsOf { title: "Rate", metric: "rate_bit_s", points: None };
    let svg = Bars::from_rows(&rows, what).svg(&Palette::default()).unwrap();
    assert!(texts(&svg).contains(&"rate (Mbit/s)"));
    assert!(texts(&svg).contains(&"41.2 Gbit/s ↑"));
}

#[test]
fn far_apart_heights_get_axes_of_their_own() {
    let rows = rates(&[("htb", 1, 190e6), ("htb", 9, 4.9e9)]);
    let what = BarsOf { title: "Rate", metric: "rate_bit_s", points: None };
    let svg = Bars::from_rows(&rows, what).svg(&Palette::default()).unwrap();
    assert!(texts(&svg).contains(&"rate (Mbit/s)"));
    assert!(texts(&svg).contains(&"rate (Gbit/s)"));
}

/// 12 ms must not look taller than 37 ms in the row below.
#[test]
fn rows_in_one_unit_have_one_axis() {
    let rows = rates(&(1..=40).map(|n| ("htb", n, f64::from(n) * 10e6)).collect::<Vec<_>>());
    let what = BarsOf { title: "Rate", metric: "rate_bit_s", points: None };
    let svg = Bars::from_rows(&rows, what).svg(&Palette::default()).unwrap();
    let panels = texts(&svg).iter().filter(|text| **text == "rate (Mbit/s)").count();
    assert!(panels > 1);
    assert_eq!(texts(&svg).iter().filter(|text| **text == "400").count(), panels + 1, "{svg}");
}

#[test]
fn all_bars_have_their_figures_or_none_has() {
    let many: Vec<String> = (0..40).map(|n| format!("s{n}")).collect();
    let rows: Vec<_> = many.iter().map(|name| (name.as_str(), 1, 99.44e6)).collect();
    let mut rows = rates(&rows);
    rows[0].value = 1e6;
    let what = BarsOf { title: "Rate", metric: "rate_bit_s", points: None };
    let svg = Bars::from_rows(&rows, what).svg(&Palette::default()).unwrap();
    assert!(!texts(&svg).contains(&"99.4") && !texts(&svg).contains(&"1"), "{:?}", texts(&svg));
}

#[test]
fn many_groups_go_on_in_another_row() {
    let rows: Vec<Row> = (1..=30)
        .map(|flows| Row {
            system: "htb".into(),
            case: Case::new().with("flows", flows),
            metric: "x".into(),
            run: 1,
            value: 10.0,
            published: None,
        })
        .collect();
    let what = BarsOf { title: "Many", metric: "x", points: None };
    let svg = Bars::from_rows(&rows, what).svg(&Palette::default()).unwrap();
    assert_eq!(texts(&svg).iter().filter(|text| **text == "x").count(), 3);
    assert!(texts(&svg).contains(&"30 flows"));
}

#[test]
fn lines_show_their_limit() {
    let svg = Figure::from(lines()).svg(&Palette::default()).unwrap();
    for text in ["limit, 1 Gbit/s", "wire (Mbit/s)", "time (ms)", "htb", "pace"] {
        assert!(texts(&svg).contains(&text), "{text}: {:?}", texts(&svg));
    }
}

#[test]
fn curves_have_a_tick_a_decade() {
    let series = vec![Series::new("tree", vec![(1e3, 300.0), (1e5, 500.0), (2e7, 4000.0)])];
    let curves = Curves {
        title: "Cost".into(),
        x: "elements".into(),
        y: "pair_ns".into(),
        series: series.clone(),
    };
    let svg = Figure::from(curves.clone()).svg(&Palette::default()).unwrap();
    for text in ["elements", "pair", "500 ns", "1 µs"] {
        assert!(texts(&svg).contains(&text), "{text}: {:?}", texts(&svg));
    }
    let zero = vec![Series::new("tree", vec![(1e3, 0.0)])];
    assert!(Curves { series: zero, ..curves }.svg(&Palette::default()).is_err());
}

#[test]
fn a_system_has_its_colour_in_every_figure() {
    let cdf = Cdf {
        title: "RTT".into(),
        metric: "rtt_us".into(),
        series: vec![Series::new("pace", vec![(30.0, 0.5), (50.0, 1.0)])],
    };
    for svg in [
        Figure::from(cdf).svg(&Palette::default()).unwrap(),
        Figure::from(lines()).svg(&Palette::default()).unwrap(),
    ] {
        assert!(svg.contains("#009E73"));
    }
}

#[test]
fn nothing_to_draw_is_said() {
    let empty = Lines { series: vec![], ..lines() };
    assert_eq!(Figure::from(empty).svg(&Palette::default()).unwrap_err().to_string(), "no points");
    let wrong = Lines { series: vec![Series::new("a", vec![(0.0, f64::NAN)])], ..lines() };
    assert!(Figure::from(wrong).svg(&Palette::default()).is_err());
    let what = BarsOf { title: "Rate", metric: "x", points: None };
    assert!(Bars::from_rows(&[], what).svg(&Palette::default()).is_err());
    let zeros = vec![Series::new("a", vec![(0.0, 1.0)])];
    assert!(
        Cdf { title: "t".into(), metric: "x".into(), series: zeros }
            .svg(&Palette::default())
            .is_err()
    );
}

#[test]
fn series_sit_in_the_middle_of_their_bins() {
    let series = Series::every("a", 2.0, &[5.0, 6.0]);
    assert_eq!(series.points, [(1.0, 5.0), (3.0, 6.0)]);
}
