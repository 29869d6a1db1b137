"""The admin pages: HTTP, their JSON, the live feed and the page's files."""
